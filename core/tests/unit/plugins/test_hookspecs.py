"""The hooks are the documented ones, in their groups, each with its page text."""

import inspect

from deepspeed.plugins import hookspecs


def test_the_groups():
    groups = {title: [hook.__name__ for hook in hooks] for title, (_, hooks) in hookspecs.GROUPS.items()}
    assert groups == {
        "Start": ["ds_probe", "ds_accelerator", "ds_op_builders", "ds_check_config"],
        "By name": [
            "ds_comm_backend",
            "ds_optimizer",
            "ds_sharding",
            "ds_checkpoint_store",
            "ds_monitor",
            "ds_launcher",
        ],
        "Events": ["ds_engine_ready", "ds_step_end", "ds_checkpoint_saved"],
        "Readings": ["ds_device_faults"],
    }


def test_the_table_holds_every_hook_of_the_file():
    named = {hook for _, hooks in hookspecs.GROUPS.values() for hook in hooks}
    written = {value for name, value in vars(hookspecs).items() if name.startswith("ds_")}
    assert named == written


def test_by_name_hooks_stop_at_the_first_result():
    for title, (_, hooks) in hookspecs.GROUPS.items():
        for hook in hooks:
            options = hook.deepspeed_spec
            assert bool(options["firstresult"]) is (title == "By name"), hook.__name__


def test_every_hook_says_when_it_is_called():
    for _, hooks in hookspecs.GROUPS.values():
        for hook in hooks:
            text = inspect.getdoc(hook) or ""
            assert "Called" in text, hook.__name__
            for argument in inspect.signature(hook).parameters:
                assert argument in text, (hook.__name__, argument)
