"""Plugins are found by name, loaded one at a time, and each failure stays where it happened."""

import subprocess
import sys
import threading
import traceback
import types

import pytest
from deepspeed.errors import PluginError
from deepspeed.plugins import ACCELERATORS, FEATURES, Offer, PluginManager, admission, hookimpl


class Entry:
    """An entry point as importlib_metadata gives it; `plugin` may be an exception to raise on load."""

    def __init__(self, name, plugin, value=None):
        self.name, self.value, self.dist = name, value or f"pkg_{name}.plugin", None
        self.plugin = plugin
        self.loads = 0

    def load(self):
        self.loads += 1
        if isinstance(self.plugin, BaseException):
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": "100"}, "broken: ds_probe offers priority '100', found str; an int is expected"),
        ({"priority": True}, "broken: ds_probe offers priority True, found bool; an int is expected"),
        ({"name": None}, "broken: ds_probe offers name None, found NoneType; a str is expected"),
        ({"available": 2}, "broken: ds_probe offers available 2, found int; a bool is expected"),
        ({"impersonates": None}, "broken: ds_probe offers impersonates None, found NoneType; a str is expected"),
        ({"impersonates": "bad"}, "broken: ds_probe offers impersonates 'bad', its own name; leave it empty"),
        ({"reason": OSError("no")}, "broken: ds_probe offers reason OSError('no'), found OSError; a str is expected"),
    ],
)
def test_an_offer_of_wrong_types_is_broken_and_stops_no_other(fields, message):
    bad = make_module(ds_probe=hookimpl(lambda: Offer(**{"name": "bad", **fields})))
    offers = make_manager(Entry("bad", bad), Entry("good", make_plugin("good"))).offers()
    assert [(offer.name, offer.available) for offer in offers] == [("good", True), ("bad", False)]
    assert offers[1].reason == message


def test_a_blocked_name_that_nothing_has_is_warned_about_once(monkeypatch):
    told = []
    monkeypatch.setattr("deepspeed.plugins.manager.warn_once", told.append)
    monkeypatch.setenv("DS_PLUGINS_BLOCK", "a,nosuch")
    manager = make_manager(Entry("a", make_plugin("a")), features=[Entry("f", make_module(ds_step_end=hears([])))])
    for _ in range(2):
        manager.hook.ds_step_end(stats=1)
    assert told == ["DS_PLUGINS_BLOCK=a,nosuch: nothing installed is named 'nosuch'; installed: a, f"]


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


def test_without_autoload_only_named_plugins_are_imported(monkeypatch):
    monkeypatch.setenv("DS_PLUGINS_AUTOLOAD", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "b")
    monkeypatch.setenv("DS_PLUGINS", "wanted")
    heard = []
    a, b = Entry("a", make_plugin("a")), Entry("b", make_plugin("b"))
    features = [Entry(name, make_module(ds_step_end=hears(heard))) for name in ("b", "other", "wanted")]
    manager = make_manager(a, b, features=features)
    assert [(offer.name, offer.available) for offer in manager.offers()] == [("b", True), ("a", False)]
    assert "DS_PLUGINS_AUTOLOAD=0; DS_ACCELERATOR=a loads it" in manager.probe("a").reason
    manager.hook.ds_step_end(stats=1)
    assert heard == [1]
    assert [entry.loads for entry in (a, b, *features)] == [0, 1, 0, 0, 1]
    with pytest.raises(PluginError, match="DS_PLUGINS_AUTOLOAD=0; DS_PLUGINS=other loads it"):
        manager.load("other", FEATURES)
    manager.register(make_plugin("a", reason="mine"), "a")  # what the program adds itself is not loaded by itself
    assert manager.probe("a").reason == "mine"


def test_autoload_is_on_or_off(monkeypatch):
    monkeypatch.setenv("DS_PLUGINS_AUTOLOAD", "no")
    with pytest.raises(PluginError, match="DS_PLUGINS_AUTOLOAD=no: 0 .* or 1 is expected"):
        make_manager(Entry("a", make_plugin("a"))).offers()
    monkeypatch.setenv("DS_PLUGINS_AUTOLOAD", "1")
    assert make_manager(Entry("a", make_plugin("a"))).probe("a").available


@pytest.mark.parametrize(("entries", "message"), [((), "no plugin named 'x'"), ((ImportError("half"),), "half")])
def test_a_feature_plugin_that_was_asked_for_by_name_must_work(monkeypatch, entries, message):
    monkeypatch.setenv("DS_PLUGINS", "x")
    manager = make_manager(features=[Entry("x", plugin) for plugin in entries])
    for _ in range(2):
        with pytest.raises(PluginError, match=f"DS_PLUGINS=x: .*{message}"):
            manager.hook.ds_step_end(stats=1)


def test_a_probe_that_hangs_is_an_offer_that_names_the_seconds_and_the_place(monkeypatch):
    monkeypatch.setenv("DS_PROBE_TIMEOUT", "0.05")
    released = threading.Event()

    def wait_for_a_driver_that_never_answers():
        released.wait()
        return Offer("a")

    plugin = make_plugin("a", ds_probe=hookimpl(specname="ds_probe")(wait_for_a_driver_that_never_answers))
    manager = make_manager(Entry("a", plugin), Entry("b", make_plugin("b")))
    b, a = manager.offers()
    assert (b.name, b.available) == ("b", True)
    assert (a.name, a.available) == ("a", False)
    assert "no answer within 0.05 s (DS_PROBE_TIMEOUT=<seconds> waits longer)" in a.reason
    told = "".join(traceback.format_exception(manager.failure("a")))
    assert "wait_for_a_driver_that_never_answers" in told.split("it hangs here")[1]
    released.set()


def test_an_import_that_hangs_is_an_offer_and_is_not_tried_again(monkeypatch):
    monkeypatch.setenv("DS_PROBE_TIMEOUT", "0.05")
    released = threading.Event()

    class Hanging(Entry):
        def load(self):
            super().load()
            released.wait()

    hanging = Hanging("a", None)
    manager = make_manager(hanging, Entry("b", make_plugin("b")))
    b, a = manager.offers()
    assert (b.name, b.available) == ("b", True)
    assert (a.name, a.available) == ("a", False)
    assert "cannot be imported from pkg_a.plugin: TimeoutError: no answer within 0.05 s" in a.reason
    assert "released.wait()" in "".join(traceback.format_exception(manager.failure("a")))
    with pytest.raises(PluginError, match=r"no answer within 0.05 s"):
        manager.load("a")
    assert hanging.loads == 1
    released.set()


def test_a_feature_plugin_has_a_longer_limit_of_its_own(monkeypatch):
    """It may load large libraries; a file server that hangs must not stop the program all the same."""
    monkeypatch.setenv("DS_PROBE_TIMEOUT", "1e-9")
    released, heard = threading.Event(), []

    class Hanging(Entry):
        def load(self):
            super().load()
            released.wait()

    features = [Entry("good", make_module(ds_step_end=hears(heard))), Hanging("hangs", None)]
    manager = make_manager(features=features)
    monkeypatch.setenv("DS_IMPORT_TIMEOUT", "60")
    manager.activate("good", FEATURES)
    monkeypatch.setenv("DS_IMPORT_TIMEOUT", "0.05")
    manager.hook.ds_step_end(stats=1)
    assert heard == [1]
    error = manager.failure("hangs", FEATURES)
    assert "no answer within 0.05 s (DS_IMPORT_TIMEOUT=<seconds> waits longer)" in str(error)
    assert "released.wait()" in "".join(traceback.format_exception(error))
    released.set()


def test_a_feature_plugin_may_use_the_manager_while_it_is_imported():
    class Asking(Entry):
        def load(self):
            seen.append(manager.probe("a").available)
            manager.activate("a")
            return make_module()

    seen = []
    manager = make_manager(Entry("a", make_plugin("a")), features=[Asking("f", None)])
    manager.hook.ds_step_end(stats=1)
    assert (seen, manager.failure("f", FEATURES)) == ([True], None)


def test_a_module_whose_import_hangs_is_given_up_once(monkeypatch, tmp_path):
    """Of op builders: a second request does not wait for the thread that hangs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "released_of_test", threading.Event(), raising=False)
    (tmp_path / "hangs_of_test.py").write_text("import sys\nsys.released_of_test.wait()\n")
    (tmp_path / "good_of_test.py").write_text(
        "from deepspeed.plugins import admission\nasked = admission.inside_probe()\n"
    )
    assert admission.import_with_limit("good_of_test").asked is False
    monkeypatch.setenv("DS_IMPORT_TIMEOUT", "0.05")
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer within 0.05 s \(DS_IMPORT_TIMEOUT=<seconds> waits longer\)"):
            admission.import_with_limit("hangs_of_test")
    sys.released_of_test.set()


def test_a_plugin_that_asks_for_other_plugins_as_it_is_imported_gets_an_error_and_no_deadlock():
    class Asking(Entry):
        def load(self):
            return manager.offers()

    manager = make_manager(Asking("a", None))
    assert "a plugin asked the plugin manager, which is waiting for its import" in manager.probe("a").reason


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds(monkeypatch, value):
    monkeypatch.setenv("DS_PROBE_TIMEOUT", value)
    with pytest.raises(PluginError, match=f"DS_PROBE_TIMEOUT={value}: it must be a number of seconds above 0"):
        make_manager(Entry("a", make_plugin("a"))).probe("a")


def test_a_probe_that_asks_who_waits_for_it_gets_an_error_and_no_deadlock():
    def ask():
        manager.offers()

    manager = make_manager(Entry("a", make_plugin("a", ds_probe=hookimpl(specname="ds_probe")(ask))))
    assert "a plugin asked the plugin manager" in manager.probe("a").reason


def test_a_package_that_ends_the_process_is_an_offer():
    probe = hookimpl(specname="ds_probe")(lambda: sys.exit("no driver"))
    manager = make_manager(Entry("a", SystemExit("no device")), Entry("b", make_plugin("b", ds_probe=probe)))
    assert "SystemExit: no device" in manager.probe("a").reason
    assert "SystemExit: no driver" in manager.probe("b").reason


def test_no_thread_is_left_behind():
    before = threading.enumerate()
    make_manager(Entry("a", make_plugin("a"))).offers()
    assert threading.enumerate() == before


def test_two_packages_with_one_name_are_refused():
    manager = make_manager(Entry("a", make_plugin("a"), "one.plugin"), Entry("a", make_plugin("a"), "two.plugin"))
    with pytest.raises(PluginError, match=r"announced by 2 packages: one.plugin .*two.plugin"):
        manager.load("a")


def test_the_same_announcement_twice_is_one():
    plugin = make_plugin("a")
    assert make_manager(Entry("a", plugin, "one.plugin"), Entry("a", plugin, "one.plugin")).load("a") is plugin


@pytest.mark.parametrize(
    "stated", [">=1,<2", "==1.3", ">=0.9", "<=1.3", " > 0.9 , < 1.4 ", "~=1.0", "==1.*", "!=2", ">=1.0.0"]
)
def test_api_range_that_fits(stated):
    manager = make_manager(Entry("a", make_plugin("a", DS_PLUGIN_API=stated)))
    assert manager.probe("a").available


def test_the_usual_api_range_is_compared_without_a_library():
    code = """
import sys, types
from deepspeed.plugins.admission import check_api
check_api(types.SimpleNamespace(DS_PLUGIN_API=">=1,<2"), "x")
sys.exit("packaging.specifiers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (">=2", r"made for plugin API '>=2', and this ds-core speaks 1.3 .*'>=1,<=1.3'.*--upgrade"),
        (">=1.4,<2", r"'>=1.4,<2', and this ds-core speaks 1.3 .*this ds-core is too old"),
        ("<1", r"'<1', and this ds-core speaks 1.3 .*'>=1,<=1.3'.*the plugin is too old: upgrade its package"),
        ("~=0.3", "the plugin is too old"),
        (">=0.5,!=1.3,<2", "install versions of the two that fit"),
        ("===first", "install versions of the two that fit"),
        ("one", "states DS_PLUGIN_API = 'one'; a version range"),
        (1, "states DS_PLUGIN_API = 1; a version range"),
    ],
)
def test_api_range_that_does_not_fit_is_found_before_any_hook_is_called(stated, message):
    plugin = make_plugin("a", DS_PLUGIN_API=stated, accelerator=object())
    asked = []
    plugin.ds_probe = hookimpl(lambda: asked.append(1))
    manager = make_manager(Entry("a", plugin))
    assert not manager.probe("a").available
    with pytest.raises(PluginError, match=message):
        manager.build_accelerator("a")
    assert asked == []


def test_misspelt_hook_and_wrong_argument_are_refused():
    late = make_module(ds_step_ends=hookimpl(lambda: None))
    with pytest.raises(PluginError, match=r"ds_step_ends, which is no hook; known: ds_step_end, ds_probe"):
        make_manager(Entry("a", late)).load("a")
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
    with pytest.raises(PluginError, match="a module, or a hashable object with hooks, is expected"):
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
    with pytest.raises(PluginError, match="has no ds_accelerator hook; .*counts only with @hookimpl above it"):
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
    assert manager.hook.ds_comm_backend(name="mine", group=None) is None
    manager.activate("b")
    assert manager.hook.ds_comm_backend(name="mine", group=None) == "b"
    assert manager.hook.ds_comm_backend(name="theirs", group=None) is None
    assert manager.providers("ds_comm_backend") == ["b"]
    manager.deactivate("b")
    assert manager.hook.ds_comm_backend(name="mine", group=None) is None


def test_the_order_of_asking_does_not_depend_on_the_order_of_loading():
    def knows(word):
        return hookimpl(specname="ds_comm_backend")(lambda name: word)

    def make(*loading):
        features = [Entry(name, make_module(ds_comm_backend=knows(name))) for name in ("g", "f")]
        manager = make_manager(Entry("device", make_plugin("device", ds_comm_backend=knows("d"))), features=features)
        for load in loading:
            load(manager)
        return manager

    def device(manager):
        manager.activate("device")

    def features(manager):
        assert manager.hook is not None

    for order in ((device, features), (features, device), (features, device, features)):
        manager = make(*order)
        assert manager.hook.ds_comm_backend(name="x", group=None) == "f"
        assert manager.providers("ds_comm_backend") == ["deepspeed.plugins:f", "deepspeed.plugins:g", "device"]


def test_a_module_in_both_groups_stays_a_feature_when_its_device_is_not_in_force():
    heard = []
    plugin = make_plugin("a", ds_step_end=hears(heard))
    manager = make_manager(Entry("a", plugin), features=[Entry("a", plugin)])
    manager.activate("a")
    manager.hook.ds_step_end(stats=1)
    manager.deactivate("a")
    manager.hook.ds_step_end(stats=2)
    assert heard == [1, 2]


def test_reports_learn_where_a_plugin_comes_from_and_what_it_does():
    manager = make_manager(Entry("a", make_plugin("a")))
    assert manager.hooks_of("a") == []  # not loaded
    assert manager.origin("a") == "an unnamed distribution (pkg_a.plugin)"
    manager.load("a")
    assert manager.hooks_of("a") == ["ds_accelerator", "ds_probe"]
    manager.register(make_plugin("b"), "b")
    assert manager.origin("b") == "registered by the program"


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
    manager.withdraw("a", PluginError("its library is missing"))
    assert manager.probe("a") == Offer("a", 3, False, "broken: its library is missing")


def test_plugins_import_no_torch():
    code = "import sys, deepspeed.plugins as p; p.plugin_manager().names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
