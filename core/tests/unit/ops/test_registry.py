"""resolve, kernel, require: device, host, plugin, reference; every "no" with its reason; nothing bound to a moment."""

import logging
import threading

import pytest
import torch
from deepspeed._installation import pip_install
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.cli.report_parts import collect_ops
from deepspeed.errors import ConfigError, OpUnavailable, PluginError
from deepspeed.log import logger
from deepspeed.ops import registry
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.plugins import FEATURES


def reasons(resolution):
    return dict(resolution.rejected)


def test_the_accelerator_comes_before_the_host_and_the_host_before_plugins(builders):
    builders.plugin("cpu", [builders.make("cpu_adam", "host's")])
    builders.plugin("extra", [builders.make("cpu_adam", "plugin's")], FEATURES)
    assert registry.kernel("cpu_adam") == "host's"
    assert registry.resolve("cpu_adam").source == "host"
    set_accelerator(builders.accelerator(builders.make("cpu_adam", "device's"))())
    assert registry.kernel("cpu_adam") == "device's"
    resolution = registry.resolve("cpu_adam")
    assert (resolution.source, resolution.rejected, resolution.why()) == ("device", (), "")
    assert resolution.builder.load() == "device's"


def test_a_feature_plugin_serves_what_nobody_else_has(builders):
    builders.plugin("extra", [builders.make("fused_adam", "plugin's")], FEATURES)
    resolution = registry.resolve("fused_adam")
    assert resolution.source == "plugin"
    assert reasons(resolution)["accelerator 'cpu' (PlainAccelerator)"] == "has no FusedAdamBuilder"
    assert reasons(resolution)["host extension 'cpu'"] == f"not installed; {pip_install('ds-ext-cpu')}"
    assert registry.kernel("fused_adam") == "plugin's"


def test_a_chosen_plugin_states_its_builders_by_the_hook(builders):
    builders.plugin("cpu", [builders.make("fused_adam", "by the hook")], priority=1)
    reset_accelerator()
    assert get_accelerator().create_op_builder("FusedAdamBuilder").load() == "by the hook"
    assert get_accelerator().create_op_builder("NoSuchBuilder") is None
    assert registry.resolve("fused_adam").source == "device"
    assert registry.kernel("fused_adam") == "by the hook"
    # the host extension is the accelerator itself here: it is asked once
    assert [where for where, _ in registry.resolve("fused_lamb").rejected] == ["accelerator 'cpu' (PlainAccelerator)"]


def test_the_hook_also_counts_for_a_class_that_knows_only_itself(builders):
    mine = builders.make("fused_lamb", "its own")
    accelerator = builders.accelerator(mine, name="meta")
    builders.plugin("xyz", [builders.make("fused_adam", "by the hook")], accelerator=accelerator)
    reset_accelerator()
    assert registry.kernel("fused_lamb") == "its own"
    assert registry.kernel("fused_adam") == "by the hook"


def test_host_kernels_do_not_serve_tensors_that_lie_elsewhere(builders):
    builders.plugin("cpu", [builders.make("fused_adam", "host's"), builders.make("cpu_adam", "host's")])
    assert registry.kernel("fused_adam") == "host's"  # on the plain device memory is the host's
    set_accelerator(builders.accelerator(name="meta")())
    assert registry.kernel("cpu_adam") == "host's"
    assert registry.kernel("fused_adam") is None
    assert "these are on 'meta'" in reasons(registry.resolve("fused_adam"))["host extension 'cpu'"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"compatible": False, "reason": "needs torch 2.10, this is 2.6"}, "not compatible: needs torch 2.10"),
        ({"compatible": False}, "not compatible: its builder gives no reason"),
        ({"compatible": OSError("driver gone")}, "is_compatible failed: OSError: driver gone"),
        ({"result": OpUnavailable("c++ found no x.h\nthe command was ...")}, "load failed: c++ found no x.h"),
        ({"result": ZeroDivisionError("division by zero")}, "load failed: ZeroDivisionError: division by zero"),
        ({"result": None}, "load failed: CPUAdamBuilder.load() returned None"),
    ],
)
def test_every_no_has_its_reason_and_the_next_place_is_asked(builders, how, reason):
    builders.plugin("cpu", [builders.make("cpu_adam", "host's")])
    set_accelerator(builders.accelerator(builders.make("cpu_adam", **{"result": "device's", **how}))())
    assert registry.kernel("cpu_adam") == "host's"
    resolution = registry.resolve("cpu_adam")
    assert resolution.source == "host"
    (told,) = reasons(resolution).values()
    assert told.startswith(reason)
    assert "\n" not in told


def test_an_op_with_other_functions_does_not_serve_the_front(builders):
    """DeepSpeed's builders give multi_tensor_adam; our fronts call operators. Who knows them can still load them."""
    theirs = object()
    builders.plugin("cpu", [builders.make("cpu_adam", "host's")])
    set_accelerator(builders.accelerator(builders.make("cpu_adam", theirs))())
    assert registry.kernel("cpu_adam") == "host's"
    assert "gives no adam_step_, which is called here" in registry.resolve("cpu_adam").why()
    assert get_accelerator().create_op_builder("CPUAdamBuilder").load() is theirs


def test_a_class_that_cannot_be_made_is_a_reason(builders):
    from deepspeed.ops.op_builder import OpBuilder

    class CPUAdamBuilder(OpBuilder):
        """Forgot everything."""

    set_accelerator(builders.accelerator(CPUAdamBuilder)())
    assert "CPUAdamBuilder() failed: TypeError" in registry.resolve("cpu_adam").why()


@pytest.mark.parametrize(
    ("plugin", "variables", "reason"),
    [
        (None, {}, f"not installed; {pip_install('ds-ext-cpu')}"),
        (ImportError("libx.so"), {}, "accelerator 'cpu' failed in ds_op_builders: ImportError: libx.so"),
        ([], {"DS_PLUGINS_BLOCK": "cpu"}, "'cpu' is blocked by DS_PLUGINS_BLOCK"),
        ([], {"DS_ACCELERATOR": "plain"}, "'cpu' is not loaded because of DS_ACCELERATOR=plain; unset it"),
        ([], {}, "has no CPUAdamBuilder"),
    ],
)
def test_a_host_extension_that_cannot_serve_says_why(builders, monkeypatch, plugin, variables, reason):
    if plugin is not None:
        builders.plugin("cpu", plugin)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert registry.kernel("cpu_adam") is None
    assert reason in reasons(registry.resolve("cpu_adam"))["host extension 'cpu'"]


def test_require_gives_the_op_or_every_reason(builders):
    builders.plugin("cpu", [builders.make("cpu_lion", "loaded")])
    with pytest.raises(OpUnavailable, match=r"op 'cpu_adam' has no kernel here: accelerator 'cpu' .*; host extension"):
        registry.require("cpu_adam")
    assert registry.require("cpu_lion") == "loaded"


def test_an_op_that_nobody_knows_is_a_mistake_of_the_caller(builders):
    with pytest.raises(ConfigError, match="op 'fused_adm' is not known; did you mean 'fused_adam'"):
        registry.kernel("fused_adm")
    with pytest.raises(ConfigError, match="op 'zzz' is not known; known are async_io, "):
        registry.resolve("zzz")


def test_a_vendors_own_op_is_found_by_its_name_and_by_its_class(builders):
    mine = builders.make("my_gemm", "gemm", class_name="MyGemmBuilder")
    set_accelerator(builders.accelerator(mine)())
    assert registry.kernel("my_gemm") == registry.kernel("MyGemmBuilder") == "gemm"
    with pytest.raises(ConfigError, match="did you mean 'MyGemmBuilder'"):
        registry.kernel("MyGemBuilder")


# ----- one load per accelerator --------------------------------------------------------------------------------------


def test_each_accelerator_has_its_own_and_each_is_loaded_once(builders):
    first, second = (builders.make("transformer", object()) for _ in range(2))
    a, b = builders.accelerator(first)(), builders.accelerator(second)()
    set_accelerator(a)
    of_a = [registry.kernel("transformer") for _ in range(3)]
    set_accelerator(b)
    of_b = [registry.kernel("transformer") for _ in range(3)]
    assert len(set(map(id, of_a))) == len(set(map(id, of_b))) == 1
    assert of_a[0] is not of_b[0]
    assert (first.loads, second.loads) == (1, 1)
    assert type(registry.resolve("transformer").builder) is second


def test_no_is_remembered_too(builders):
    failing = builders.make("fused_adam", OpUnavailable("no compiler"))
    set_accelerator(builders.accelerator(failing)())
    assert [registry.kernel("fused_adam") for _ in range(3)] == [None] * 3
    assert failing.loads == 1
    registry.reset()
    assert registry.kernel("fused_adam") is None
    assert failing.loads == 2


def test_resolve_neither_loads_nor_remembers(builders):
    kind = builders.make("fused_adam")
    set_accelerator(builders.accelerator(kind)())
    assert type(registry.resolve("fused_adam").builder) is kind
    assert kind.loads == 0


def test_many_threads_load_once(builders):
    kind = builders.make("transformer", object())
    set_accelerator(builders.accelerator(kind)())
    barrier, got = threading.Barrier(8), []

    def ask():
        barrier.wait()
        got.append(registry.kernel("transformer"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert kind.loads == 1


# ----- DS_OPS_DISABLE ------------------------------------------------------------------------------------------------


def test_ops_can_be_disabled_by_name_at_any_time(builders, monkeypatch):
    set_accelerator(builders.accelerator(builders.make("fused_adam"), builders.make("fused_lamb"))())
    assert registry.kernel("fused_adam") == "kernel"
    monkeypatch.setenv("DS_OPS_DISABLE", "quantizer, fused_adam")
    assert registry.kernel("fused_adam") is None
    assert registry.kernel("fused_lamb") == "kernel"
    assert registry.resolve("fused_adam").why() == "environment: disabled by DS_OPS_DISABLE=quantizer, fused_adam"
    monkeypatch.setenv("DS_OPS_DISABLE", "all")
    assert registry.kernel("fused_lamb") is None
    with pytest.raises(OpUnavailable, match="disabled by DS_OPS_DISABLE=all"):
        registry.require("fused_lamb")
    monkeypatch.delenv("DS_OPS_DISABLE")
    assert registry.kernel("fused_adam") == "kernel"


# ----- what is told --------------------------------------------------------------------------------------------------


def test_one_quiet_line_per_op_from_rank_0(builders, monkeypatch, lines):
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        registry.kernel("fused_adam")
        registry.reset()
        registry.kernel("fused_adam")
        monkeypatch.setenv("RANK", "1")
        registry.kernel("cpu_adam")
    finally:
        logger.setLevel(level)
    ((tone, text),) = lines
    assert tone == "INFO"
    assert text.startswith("op 'fused_adam' runs on its torch reference (accelerator 'cpu' (PlainAccelerator): has no")


@pytest.mark.parametrize(
    "how",
    [
        {"result": OpUnavailable("no compiler on PATH")},
        {"compatible": False, "reason": "no compiler on PATH"},
        {"compatible": OSError("no compiler on PATH")},
    ],
)
def test_a_kernel_that_is_installed_and_cannot_be_used_is_a_warning(builders, lines, how):
    set_accelerator(builders.accelerator(builders.make("fused_adam", **how))())
    registry.kernel("fused_adam")
    ((tone, text),) = lines
    assert tone == "WARNING"
    assert "no compiler on PATH" in text


def test_beside_a_device_the_missing_host_extension_is_one_warning_and_the_reference_steps(builders, lines):
    set_accelerator(builders.accelerator(name="meta")())
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = DeepSpeedCPUAdam([param], lr=0.1)
    for _ in range(2):
        optimizer.step()
    ((tone, text),) = lines
    assert tone == "WARNING"
    assert text.startswith("op 'cpu_adam' runs on its torch reference")
    assert f"host extension 'cpu': not installed; {pip_install('ds-ext-cpu')}" in text
    assert param[0] < 1.0


def test_a_device_extension_overrides_an_op_of_the_host_by_its_name(builders):
    builders.plugin("cpu", [builders.make("cpu_adam", "host's"), builders.make("cpu_lion", "host's")])
    mine = builders.make("cpu_adam", "the device's, over its link")
    set_accelerator(builders.accelerator(mine, name="meta")())
    assert registry.kernel("cpu_adam") == "the device's, over its link"
    assert registry.kernel("cpu_lion") == "host's"


# ----- builders of another year --------------------------------------------------------------------------------------


def test_builders_without_the_argument_verbose(builders):
    class TransformerBuilder:
        """Written for the first DeepSpeed; not even of our base class."""

        def is_compatible(self):
            return True

        def load(self):
            return "old"

    set_accelerator(builders.accelerator(TransformerBuilder)())
    assert registry.kernel("transformer") == "old"


def test_a_class_that_stands_for_not_implemented_is_no_builder(builders):
    """DeepSpeed's vendors answer unknown names with a class whose load() raises."""

    class NotImplementedBuilder:
        NAME = "deepspeed_not_implemented"

        def is_compatible(self, verbose=False):
            return True

        def load(self, verbose=True):
            raise ValueError("This op had not been implemented")

    class Old(builders.accelerator()):
        def get_op_builder(self, class_name):
            return NotImplementedBuilder

    set_accelerator(Old())
    assert registry.resolve("fused_adam").builder is None
    assert reasons(registry.resolve("fused_adam"))["accelerator 'sim' (Old)"] == "has no FusedAdamBuilder"


def test_a_package_of_builders_that_cannot_be_asked_is_told_once_and_marks_its_ops_failed(builders, monkeypatch):
    told = []
    monkeypatch.setattr(registry, "warn_once", told.append)
    builders.plugin("xyz", PluginError("its op builders cannot be imported"), priority=1)
    builders.plugin("cpu", [builders.make("cpu_adam", "host's")])
    reset_accelerator()
    assert registry.resolve("fused_adam").failed
    assert told == []  # looking says nothing
    assert registry.kernel("fused_adam") is None
    assert registry.kernel("cpu_adam") == "host's"
    assert len(set(told)) == 1
    assert "its op builders cannot be imported; none of its op builders is used" in told[0]
    rows = {row["op"]: row for row in collect_ops()}
    assert (rows["fused_adam"]["state"], rows["fused_adam"]["offered"]) == ("failed", True)
    assert "cannot be imported" in str(rows["fused_adam"]["rejected"])
    assert rows["cpu_adam"]["source"] == "host"


def test_a_place_that_is_kept_out_has_not_failed(builders, monkeypatch):
    builders.plugin("cpu", [builders.make("cpu_adam", "host's")])
    monkeypatch.setenv("DS_PLUGINS_BLOCK", "cpu")
    resolution = registry.resolve("cpu_adam")
    assert (resolution.source, resolution.failed) == ("reference", ())
    assert "accelerator 'cpu' is blocked by DS_PLUGINS_BLOCK" in resolution.why()


def test_a_host_extension_that_is_not_installed_has_not_failed(builders):
    assert registry.resolve("cpu_adam").failed == ()
