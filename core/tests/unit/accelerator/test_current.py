"""set_accelerator > DS_ACCELERATOR > highest available priority > plain; every failure says what to do."""

import threading

import pytest
from deepspeed._installation import pip_install
from deepspeed.accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
    real_accelerator,
    set_accelerator,
)
from deepspeed.accelerator.current import explain, reset_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.errors import PluginError


class A_Accelerator(PlainAccelerator):
    pass


class B_Accelerator(PlainAccelerator):
    pass


def test_highest_available_priority_wins(shelf):
    shelf.put("a", 1, build=A_Accelerator)
    shelf.put("b", 2, build=B_Accelerator, reason="2 devices")
    shelf.put("c", 3, available=False, reason="no device")
    assert type(get_accelerator()) is B_Accelerator
    assert get_accelerator() is get_accelerator()
    assert shelf.built == {"a": 0, "b": 1, "c": 0}
    assert explain().plugin == "b"
    assert "2 devices" in explain().why
    assert is_current_accelerator_supported()


def test_a_tie_is_an_error_that_names_both_and_is_not_remembered(shelf, monkeypatch):
    shelf.put("a", 5, build=A_Accelerator)
    shelf.put("b", 5, build=B_Accelerator)
    with pytest.raises(PluginError, match=r"'a' and 'b'.*priority 5.*DS_ACCELERATOR=a or DS_ACCELERATOR=b"):
        get_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "b")
    assert type(get_accelerator()) is B_Accelerator


def test_a_tie_below_the_winner_does_not_matter(shelf):
    for name, priority in (("a", 5), ("b", 5), ("c", 6)):
        shelf.put(name, priority, build=A_Accelerator)
    get_accelerator()
    assert explain().plugin == "c"


class Posing_Accelerator(PlainAccelerator):
    """The CPU by another name of the entry point."""


def test_two_claims_on_one_device_of_torch_are_an_error_that_names_both(shelf, monkeypatch):
    shelf.put("cpu", 1, build=A_Accelerator)
    shelf.put("poser", 9, build=Posing_Accelerator, impersonates="cpu")
    claims = (
        r"'poser' \(from .*poser.plugin.*, which poses as 'cpu'\) and 'cpu' \(from .*cpu.plugin.*\) both claim torch's"
    )
    with pytest.raises(PluginError, match=rf"{claims} device 'cpu'.*DS_ACCELERATOR=poser or DS_ACCELERATOR=cpu"):
        get_accelerator()
    assert shelf.built == {"cpu": 0, "poser": 0}
    for name, kind in (("poser", Posing_Accelerator), ("cpu", A_Accelerator)):
        monkeypatch.setenv("DS_ACCELERATOR", name)
        assert type(get_accelerator()) is kind
        reset_accelerator()


class Meta_Accelerator(PlainAccelerator):
    """Of a device that is not the host."""

    _name = "meta"


def test_a_claim_that_was_not_declared_is_found_when_the_accelerator_is_there(shelf):
    shelf.put("meta", 1, build=Meta_Accelerator)
    shelf.put("poser", 9, build=Meta_Accelerator)
    claims = r"'poser'.* and 'meta'.* both claim torch's device 'meta'.*impersonates='meta'"
    with pytest.raises(PluginError, match=claims):
        get_accelerator()


def test_the_host_is_everybodys(shelf):
    shelf.put("cpu", 1, build=A_Accelerator)
    shelf.put("better", 9, build=Posing_Accelerator)
    assert type(get_accelerator()) is Posing_Accelerator


def test_claims_that_do_not_matter(shelf, monkeypatch):
    shelf.put("cpu", 1, available=False, reason="not here")
    shelf.put("poser", 9, build=Posing_Accelerator, impersonates="cpu")
    shelf.put("other", 5, build=A_Accelerator, impersonates="xyz")
    shelf.put("another", 4, build=A_Accelerator, impersonates="xyz")
    assert type(get_accelerator()) is Posing_Accelerator  # it has its device alone


def test_one_that_poses_as_another_device_than_its_own(shelf, monkeypatch):
    shelf.put("poser", 9, build=Posing_Accelerator, impersonates="cuda")
    monkeypatch.setenv("DS_ACCELERATOR", "poser")
    with pytest.raises(PluginError, match=r"its Offer poses as 'cuda', and Posing_Accelerator has the `_name` 'cpu'"):
        get_accelerator()


def test_the_variable_beats_priority_and_loads_that_plugin_alone(shelf, monkeypatch):
    shelf.put("a", 1, build=A_Accelerator)
    shelf.put("b", 2, broken=AssertionError("was imported"))
    monkeypatch.setenv("DS_ACCELERATOR", "a")
    assert type(get_accelerator()) is A_Accelerator
    assert shelf.manager.failure("b") is None
    assert explain().why == "DS_ACCELERATOR=a"


def test_set_accelerator_beats_the_variable_and_asks_no_plugin(shelf, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "nosuch")
    mine = A_Accelerator()
    set_accelerator(mine)
    assert get_accelerator() is mine
    assert explain().plugin is None


def test_set_accelerator_refuses_none_and_keeps_what_was_set(shelf):
    mine = A_Accelerator()
    set_accelerator(mine)
    with pytest.raises(PluginError, match=r"None \(NoneType\) is no accelerator"):
        set_accelerator(None)
    assert get_accelerator() is mine


def test_reset_accelerator_forgets(shelf):
    shelf.put("a", build=A_Accelerator)
    set_accelerator(B_Accelerator())
    reset_accelerator()
    assert type(get_accelerator()) is A_Accelerator


def test_deepspeeds_global_of_the_accelerator_follows_the_choice(shelf):
    assert real_accelerator.ds_accelerator is None
    mine = A_Accelerator()
    real_accelerator.set_accelerator(mine)
    assert real_accelerator.ds_accelerator is real_accelerator.get_accelerator() is mine


def test_a_name_that_is_not_installed(shelf, monkeypatch):
    shelf.put("cpu", build=A_Accelerator)
    monkeypatch.setenv("DS_ACCELERATOR", "nosuch")
    with pytest.raises(
        PluginError, match=r"DS_ACCELERATOR=nosuch:.*installed: cpu; install the package that announces it"
    ):
        get_accelerator()


def test_a_broken_plugin_is_fatal_only_by_name(shelf, monkeypatch, warned):
    shelf.put("bad", 100, broken=ImportError("libbad.so is missing"))
    shelf.put("good", 1, build=A_Accelerator)
    assert type(get_accelerator()) is A_Accelerator
    reset_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "bad")
    with pytest.raises(PluginError, match=r"DS_ACCELERATOR=bad:.*libbad.so is missing"):
        get_accelerator()


def test_a_device_that_is_not_there_is_fatal_by_name(shelf, monkeypatch):
    shelf.put("a", available=False, reason="no /dev/a")
    monkeypatch.setenv("DS_ACCELERATOR", "a")
    with pytest.raises(PluginError, match="DS_ACCELERATOR=a: .*cannot be used here: no /dev/a; unset DS_ACCELERATOR"):
        get_accelerator()


def test_a_plugin_that_probes_well_and_builds_badly_makes_room_for_the_next(shelf, warned):
    def build():
        raise OSError("driver too old")

    shelf.put("bad", 100, build=build)
    shelf.put("good", 1, build=A_Accelerator)
    assert type(get_accelerator()) is A_Accelerator
    (message,) = warned
    assert "driver too old" in message
    assert "`ds_report --verbose` shows the traceback" in message
    assert not shelf.manager.probe("bad").available
    assert shelf.manager.probe("bad").priority == 100


def test_core_alone_is_plain_with_one_warning(shelf, warned):
    assert type(get_accelerator()) is PlainAccelerator
    get_accelerator()
    (message,) = warned
    assert pip_install("ds-ext-cpu") in message


@pytest.mark.parametrize(
    ("variable", "value", "num_warnings"),
    [
        *(("LOCAL_RANK", "0", 1), ("LOCAL_RANK", "1", 0), ("SLURM_LOCALID", "3", 0)),
        *(("OMPI_COMM_WORLD_LOCAL_RANK", "1", 0), ("DS_UNCAUGHT_PIPE", "7:99", 0)),  # the launcher has chosen before
    ],
)
def test_one_process_of_a_node_warns_of_the_plain_device(shelf, monkeypatch, warned, variable, value, num_warnings):
    monkeypatch.setenv(variable, value)
    assert type(get_accelerator()) is PlainAccelerator
    assert len(warned) == num_warnings


def test_nothing_available_is_plain_and_says_why(shelf, warned):
    shelf.put("a", available=False, reason="no /dev/a")
    assert type(get_accelerator()) is PlainAccelerator
    (message,) = warned
    assert "a: no /dev/a" in message


def test_plain_by_name_is_silent(shelf, monkeypatch, warned):
    shelf.put("a", build=A_Accelerator)
    monkeypatch.setenv("DS_ACCELERATOR", "plain")
    assert type(get_accelerator()) is PlainAccelerator
    assert warned == []


def test_only_the_chosen_plugin_hears_hooks(shelf):
    shelf.put("a", 1, build=A_Accelerator)
    shelf.put("b", 2, build=B_Accelerator)
    get_accelerator()
    assert shelf.manager.providers("ds_accelerator") == ["b"]
    set_accelerator(A_Accelerator())
    assert shelf.manager.providers("ds_accelerator") == []


def test_many_threads_get_one_object_built_once(shelf):
    shelf.put("a", build=A_Accelerator)
    barrier, got = threading.Barrier(8), []

    def ask():
        barrier.wait()
        got.append(get_accelerator())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert shelf.built["a"] == 1


def test_a_plugin_that_asks_for_the_accelerator_gets_an_error_and_no_deadlock(shelf, monkeypatch):
    shelf.put("a", build=get_accelerator)
    monkeypatch.setenv("DS_ACCELERATOR", "a")
    with pytest.raises(PluginError, match="get_accelerator.. was called by an accelerator plugin"):
        get_accelerator()


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (5, r"5 \(int\) is no accelerator: it lacks device_name"),
        ("cpu", "is no accelerator"),
        (PlainAccelerator, r"not the class; call it: PlainAccelerator\(\)"),
        (DeepSpeedAccelerator(), "has no `_name`"),
    ],
)
def test_what_is_no_accelerator_is_refused(shelf, thing, message):
    with pytest.raises(PluginError, match=message):
        set_accelerator(thing)


def test_a_plugin_that_builds_no_accelerator(shelf, monkeypatch):
    shelf.put("a", build=lambda: 5)
    monkeypatch.setenv("DS_ACCELERATOR", "a")
    with pytest.raises(PluginError, match="no accelerator"):
        get_accelerator()


def test_each_broken_plugin_is_warned_about_whichever_wins_and_an_absent_device_is_not(shelf, warned):
    shelf.put("good", 1, build=A_Accelerator)
    shelf.put("absent", 500, available=False, reason="no device")
    shelf.put("unimportable", broken=ImportError("libbad.so is missing"))
    shelf.put("misprioritized", "100", build=B_Accelerator)
    assert type(get_accelerator()) is A_Accelerator
    misprioritized, unimportable = warned
    assert unimportable.startswith("accelerator 'unimportable' of ")
    assert "libbad.so is missing" in unimportable
    assert misprioritized.startswith("accelerator 'misprioritized': ds_probe offers priority '100', found str")


def test_a_blocked_plugin_is_not_warned_about(shelf, monkeypatch, warned):
    shelf.put("good", build=A_Accelerator)
    shelf.put("bad", broken=ImportError("libbad.so is missing"))
    assert not shelf.manager.probe("bad").available
    monkeypatch.setenv("DS_PLUGINS_BLOCK", "bad")
    get_accelerator()
    assert warned == []


class Unknown_Accelerator(DeepSpeedAccelerator):
    _name = "zetta"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Unknown_Accelerator, "Unknown_Accelerator has the `_name` 'zetta', which is no device type of torch"),
        (DeepSpeedAccelerator, "DeepSpeedAccelerator has no `_name`"),
        (lambda: PlainAccelerator, r"not the class; call it: PlainAccelerator\(\)"),
    ],
)
def test_what_a_plugin_builds_wrongly_names_the_plugin_and_counts_as_broken(shelf, monkeypatch, build, message):
    shelf.put("bad", build=build)
    monkeypatch.setenv("DS_ACCELERATOR", "bad")
    with pytest.raises(PluginError, match=f"DS_ACCELERATOR=bad: accelerator 'bad': .*{message}.*ds_report --verbose"):
        get_accelerator()
    assert shelf.manager.failure("bad") is not None


@pytest.mark.parametrize("name", ["unimportable", "misprioritized", "unbuilt", "nosuch"])
def test_by_name_the_error_stands_alone_as_its_cause_is_in_it(shelf, monkeypatch, name):
    shelf.put("unimportable", broken=ImportError("no libbad.so"))
    shelf.put("misprioritized", "100", build=A_Accelerator)
    shelf.put("unbuilt", build=lambda: 1 / 0)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(PluginError, match=f"DS_ACCELERATOR={name}: ") as raised:
        get_accelerator()
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert ("`ds_report --verbose` shows the traceback" in str(raised.value)) == (name != "nosuch")


def test_a_name_in_other_letters_is_recognized(shelf, monkeypatch):
    shelf.put("cpu", build=A_Accelerator)
    monkeypatch.setenv("DS_ACCELERATOR", "CPU")
    with pytest.raises(PluginError, match=r"did you mean 'cpu'\? Otherwise"):
        get_accelerator()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("cuda", r"installed: cpu; pip install \S*ds-ext-cuda$"),
        ("cdua", r"did you mean 'cuda' \(pip install \S*ds-ext-cuda\)\? Otherwise: install the package"),
        ("XPU", r"did you mean 'xpu' \(pip install \S*ds-ext-xpu\)\?"),
        ("plian", r"did you mean 'plain'\?"),
        ("zetta", r"installed: cpu; install the package that announces it"),
    ],
)
def test_an_extension_of_this_project_that_is_not_installed_is_named(shelf, monkeypatch, name, remedy):
    shelf.put("cpu", build=A_Accelerator)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(PluginError, match=f"DS_ACCELERATOR={name}: no accelerator named '{name}' .*{remedy}"):
        get_accelerator()


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize("value", ["a\x1b[31mb", "one\ntwo", "\u202egpu", "x" * 5000])
def test_a_hostile_name_is_shown_as_text(monkeypatch, value):
    monkeypatch.setenv("DS_ACCELERATOR", value)
    with pytest.raises(PluginError) as caught:
        get_accelerator()
    told = str(caught.value)
    assert told.startswith(f"DS_ACCELERATOR={value[:60]!r}")
    assert told.isprintable()
    assert len(told) < 800
