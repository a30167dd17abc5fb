"""Plugins are found by name, loaded one at a time, and each failure stays where it happened."""

import sys
import types

import pytest
from deepspeed.errors import PluginError
from deepspeed.plugins import ACCELERATORS, FEATURES, Offer, PluginManager, hookimpl


class Entry:
    """An entry point as importlib_metadata gives it; `plugin` may be an exception to raise on load."""

    def __init__(self, name, plugin, value=None):
        self.name, self.value, self.dist = name, value or f"pkg_{name}.plugin", None
        self.plugin = plugin
        self.loads = 0

    def load(self):
        self.loads += 1
        if isinstance(self.plugin, Exception):
            raise self.plugin
        return self.plugin


def make_module(**attributes):
    module = types.ModuleType("plugin_of_a_test")
    vars(module).update(attributes)
    return module


def hears(heard):
    @hookimpl
    def ds_step_end(stats):
        heard.append(stats)

    return ds_step_end


def make_plugin(name="xyz", priority=100, available=True, reason="here", accelerator=None, **attributes):
    plugin = make_module()

    @hookimpl
    def ds_probe():
        return Offer(name, priority, available, reason)

    @hookimpl
    def ds_accelerator():
        return accelerator

    plugin.ds_probe, plugin.ds_accelerator = ds_probe, ds_accelerator
    vars(plugin).update(attributes)
    return plugin


def make_manager(*entries, features=()):
    return PluginManager(lambda group: {ACCELERATORS: entries, FEATURES: features}[group])


def test_names_import_nothing():
    entries = Entry("b", make_plugin("b")), Entry("a", ImportError("no"))
    assert make_manager(*entries).names() == ["a", "b"]
    assert [entry.loads for entry in entries] == [0, 0]


def test_load_by_name_loads_only_that_one():
    wanted, other = Entry("a", make_plugin("a")), Entry("b", make_plugin("b"))
    manager = make_manager(wanted, other)
    assert manager.load("a") is wanted.plugin
    assert manager.load("a") is wanted.plugin
    assert (wanted.loads, other.loads) == (1, 0)


def test_missing_name_says_what_is_installed_and_what_to_install():
    manager = make_manager(Entry("cpu", make_plugin("cpu")))
    with pytest.raises(PluginError, match=r"'nosuch'.*installed: cpu; install the package that announces it"):
        manager.load("nosuch")
    with pytest.raises(PluginError, match="did you mean 'cpu'"):
        manager.load("cpuu")


@pytest.mark.parametrize("error", [ImportError("libxyz.so: cannot open"), OSError("driver"), RuntimeError("half")])
def test_import_failure_is_an_offer_and_stops_no_other(error):
    manager = make_manager(Entry("bad", error), Entry("good", make_plugin("good")))
    good, bad = manager.offers()
    assert (good.name, good.available) == ("good", True)
    assert (bad.name, bad.available) == ("bad", False)
    assert str(error) in bad.reason
    with pytest.raises(PluginError, match="'bad'.*pkg_bad.plugin") as raised:
        manager.load("bad")
    assert raised.value.__cause__ is error
    assert manager.failure("bad") is raised.value


def test_failed_import_is_not_tried_again():
    entry = Entry("bad", ImportError("no"))
    manager = make_manager(entry)
    for _ in range(2):
        with pytest.raises(PluginError):
            manager.load("bad")
    assert entry.loads == 1


def test_probe_that_raises_is_an_offer():
    plugin = make_plugin("bad")

    @hookimpl
    def ds_probe():
        raise ValueError("two\nlines")

    plugin.ds_probe = ds_probe
    offer = make_manager(Entry("bad", plugin)).probe("bad")
    assert not offer.available
    assert "failed in ds_probe: ValueError: two lines" in offer.reason


@pytest.mark.parametrize(
    ("answer", "message"),
    [(None, "returned None, not an Offer"), (("bad", 1), "not an Offer"), (Offer("other"), "'other' under the entry")],
)
def test_probe_that_answers_nonsense_is_an_offer(answer, message):
    plugin = make_module(ds_probe=hookimpl(lambda: answer))
    offer = make_manager(Entry("bad", plugin)).probe("bad")
    assert not offer.available
    assert message in offer.reason


def test_probe_is_asked_once():
    calls = []
    plugin = make_module(ds_probe=hookimpl(lambda: calls.append(1) or Offer("a")))
    manager = make_manager(Entry("a", plugin))
    assert manager.probe("a") is manager.probe("a")
    assert calls == [1]


def test_offers_stand_in_order_of_choice():
    manager = make_manager(
        Entry("low", make_plugin("low", 1)),
        Entry("absent", make_plugin("absent", 500, available=False, reason="no device")),
        Entry("high", make_plugin("high", 9)),
    )
    assert [offer.name for offer in manager.offers()] == ["high", "low", "absent"]


def test_blocked_names_are_not_imported(monkeypatch):
    monkeypatch.setenv("DS_PLUGINS_BLOCK", " a , zzz,")
    blocked, free = Entry("a", make_plugin("a")), Entry("b", make_plugin("b"))
    manager = make_manager(blocked, free)
    assert [(offer.name, offer.available) for offer in manager.offers()] == [("b", True), ("a", False)]
    assert "DS_PLUGINS_BLOCK" in manager.probe("a").reason
    assert blocked.loads == 0
    with pytest.raises(PluginError, match="blocked by DS_PLUGINS_BLOCK"):
        manager.load("a")


def test_two_packages_with_one_name_are_refused():
    manager = make_manager(Entry("a", make_plugin("a"), "one.plugin"), Entry("a", make_plugin("a"), "two.plugin"))
    with pytest.raises(PluginError, match=r"announced by 2 packages: one.plugin .*two.plugin"):
        manager.load("a")


def test_the_same_announcement_twice_is_one():
    plugin = make_plugin("a")
    assert make_manager(Entry("a", plugin, "one.plugin"), Entry("a", plugin, "one.plugin")).load("a") is plugin


@pytest.mark.parametrize("stated", [">=1,<2", "==1.0", ">=0.9"])
def test_api_range_that_fits(stated):
    manager = make_manager(Entry("a", make_plugin("a", DS_PLUGIN_API=stated)))
    assert manager.probe("a").available


@pytest.mark.parametrize(("stated", "message"), [(">=2", "made for plugin API '>=2'.*speaks 1.0"), ("one", "states")])
def test_api_range_that_does_not_fit_is_found_before_any_hook_is_called(stated, message):
    plugin = make_plugin("a", DS_PLUGIN_API=stated, accelerator=object())
    plugin.ds_probe = hookimpl(lambda: pytest.fail("was asked"))
    manager = make_manager(Entry("a", plugin))
    assert not manager.probe("a").available
    with pytest.raises(PluginError, match=message):
        manager.build_accelerator("a")


def test_misspelt_hook_and_wrong_argument_are_refused():
    misspelt = make_module(ds_prob=hookimpl(lambda: None))
    with pytest.raises(PluginError, match=r"ds_prob, which is no hook; known: ds_probe, ds_accelerator"):
        make_manager(Entry("a", misspelt)).load("a")
    wrong = make_module(ds_optimizer=hookimpl(lambda nmae: None))
    manager = make_manager(Entry("a", wrong))
    with pytest.raises(PluginError, match="nmae"):
        manager.load("a")
    manager.register(make_plugin("a"), "a")  # the broken one left nothing behind
    assert manager.probe("a").available


@pytest.mark.parametrize("thing", [None, [], {}])
def test_what_is_no_plugin_at_all_is_refused(thing):
    with pytest.raises(PluginError, match="a module, or a hashable object with hooks, is meant"):
        make_manager(Entry("a", thing)).load("a")


def test_an_optional_hook_of_a_later_api_is_accepted():
    plugin = make_plugin("a")
    plugin.ds_of_the_future = hookimpl(optionalhook=True)(lambda: None)
    assert make_manager(Entry("a", plugin)).load("a") is plugin


def test_build_accelerator_and_its_failures():
    built = object()
    assert make_manager(Entry("a", make_plugin("a", accelerator=built))).build_accelerator("a") is built
    with pytest.raises(PluginError, match="returned None"):
        make_manager(Entry("a", make_plugin("a"))).build_accelerator("a")
    without = make_module(ds_probe=hookimpl(lambda: Offer("a")))
    with pytest.raises(PluginError, match="has no ds_accelerator hook"):
        make_manager(Entry("a", without)).build_accelerator("a")

    @hookimpl
    def ds_accelerator():
        raise OSError("driver too old")

    failing = make_module(ds_accelerator=ds_accelerator)
    with pytest.raises(PluginError, match="failed in ds_accelerator: OSError: driver too old"):
        make_manager(Entry("a", failing)).build_accelerator("a")


def test_each_plugin_is_asked_alone():
    first, second = object(), object()
    manager = make_manager(
        Entry("a", make_plugin("a", accelerator=first)), Entry("b", make_plugin("b", accelerator=second))
    )
    manager.offers()
    assert manager.build_accelerator("a") is first
    assert manager.build_accelerator("b") is second


def test_op_builders():
    class XBuilder:
        pass

    plugin = make_plugin("a", ds_op_builders=hookimpl(lambda: {"XBuilder": XBuilder}))
    manager = make_manager(Entry("a", plugin), Entry("b", make_plugin("b")))
    assert manager.op_builders("a") == {"XBuilder": XBuilder}
    assert manager.op_builders("b") == {}


def test_only_active_plugins_hear_hooks_by_name():
    def knows(word):
        return hookimpl(lambda name: word if name == "mine" else None)

    manager = make_manager(
        Entry("a", make_plugin("a", ds_comm_backend=knows("a"))),
        Entry("b", make_plugin("b", ds_comm_backend=knows("b"))),
    )
    manager.offers()  # loads both
    assert manager.hook.ds_comm_backend(name="mine") is None
    manager.activate("b")
    assert manager.hook.ds_comm_backend(name="mine") == "b"
    assert manager.hook.ds_comm_backend(name="theirs") is None
    assert manager.providers("ds_comm_backend") == ["b"]
    manager.deactivate("b")
    assert manager.hook.ds_comm_backend(name="mine") is None


def test_feature_plugins_are_loaded_by_the_first_hook_and_a_broken_one_is_warned_about(monkeypatch):
    warned, heard = [], []
    monkeypatch.setattr("deepspeed.plugins.manager.logger.warning", warned.append)
    feature = make_module(ds_step_end=hears(heard))
    entries = Entry("good", feature), Entry("bad", ImportError("no such thing"))
    manager = make_manager(features=entries)
    assert manager.names(FEATURES) == ["bad", "good"]
    assert [entry.loads for entry in entries] == [0, 0]
    manager.hook.ds_step_end(stats=7)
    manager.hook.ds_step_end(stats=8)
    assert heard == [7, 8]
    assert [entry.loads for entry in entries] == [1, 1]
    (message,) = warned
    assert "'bad'" in message
    assert "no such thing" in message


def test_one_module_in_both_groups_is_called_once():
    heard = []
    plugin = make_plugin("a", ds_step_end=hears(heard))
    manager = make_manager(Entry("a", plugin), features=[Entry("a", plugin)])
    manager.activate("a")
    manager.hook.ds_step_end(stats=1)
    assert heard == [1]


def test_registered_plugin_wins_over_an_installed_one_and_can_be_taken_back():
    installed, mine = Entry("a", make_plugin("a", reason="installed")), make_plugin("a", reason="mine")
    manager = make_manager(installed)
    assert manager.probe("a").reason == "installed"
    manager.register(mine, "a")
    assert manager.probe("a").reason == "mine"
    manager.unregister("a")
    assert manager.probe("a").reason == "installed"
    manager.unregister("nosuch")


def test_withdrawn_offer_is_unavailable():
    manager = make_manager(Entry("a", make_plugin("a", priority=3)))
    manager.withdraw("a", "its library is missing")
    assert manager.probe("a") == Offer("a", 3, False, "its library is missing")


def test_plugins_import_no_torch():
    import subprocess

    code = "import sys, deepspeed.plugins as p; p.plugin_manager().names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
