"""MonitorMaster: which monitors there are, and that none of them stops training."""

import subprocess
import sys

import pytest
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import Monitor, MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.plugins import hookimpl
from deepspeed.plugins.manager import FEATURES, plugin_manager

EVENTS = [("a/loss", 0.5, 4)]


def monitor_config(**sections):
    return DeepSpeedConfig({"train_batch_size": 1, **sections}).monitor_config


@pytest.fixture
def plugin():
    """A feature plugin, registered and active while the test runs: `plugin(function of name and arguments)`."""
    manager = plugin_manager()
    assert manager.hook is not None  # feature plugins are loaded before ours comes

    def add(answer):
        class Plugin:
            @hookimpl
            def ds_monitor(self, name, arguments):
                return answer(name, arguments)

        manager.register(Plugin(), "test_monitor", FEATURES)
        manager.activate("test_monitor", FEATURES)

    yield add
    manager.deactivate("test_monitor", FEATURES)
    manager.unregister("test_monitor", FEATURES)


class Recorder:
    """The least that a plugin's monitor can be."""

    def __init__(self):
        self.events = []

    def write_events(self, events):
        self.events += events
        events.clear()  # its own copy


class Broken:
    def write_events(self, events):
        raise OSError("no space left")


def warnings(lines):
    return [text for level, text in lines if level == "WARNING"]


# ---- which there are ------------------------------------------------------------------------------------------------


def test_nothing_is_switched_on_by_default(lines):
    master = MonitorMaster(DeepSpeedMonitorConfig())
    master.write_events(EVENTS)
    assert (master.enabled, master.monitors, lines) == (False, {}, [])
    assert (master.tb_monitor, master.wandb_monitor, master.comet_monitor, master.csv_monitor) == (None,) * 4


def test_every_section_that_is_switched_on(tmp_path, wandb, comet_ml, summary_writer):
    master = MonitorMaster(
        monitor_config(
            csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
            tensorboard={"enabled": True},
            wandb={"enabled": True},
            comet={"enabled": True},
        )
    )
    assert list(master.monitors) == ["tensorboard", "wandb", "comet", "csv_monitor"]
    assert all(isinstance(monitor, Monitor) for monitor in master.monitors.values())
    master.write_events(EVENTS)
    assert (tmp_path / "job/a_loss.csv").read_text() == "step,loss\n4,0.5\n"
    assert ("add_scalar", ("a/loss", 0.5, 4)) in summary_writer.calls
    assert ("log", ({"a/loss": 0.5}, 4, None)) in wandb.calls
    assert ("log_metric", ("a/loss", 0.5, 4)) in comet_ml.calls
    master.close()
    assert (wandb.calls[-1][0], comet_ml.calls[-1][0], summary_writer.calls[-1][0]) == ("finish", "end", "close")
    assert master.monitors == {}


def test_another_rank_has_none(wandb, another_rank):
    master = MonitorMaster(monitor_config(wandb={"enabled": True}))
    master.write_events(EVENTS)
    assert (master.enabled, master.monitors, wandb.calls) == (True, {}, [])


def test_packages_are_imported_only_when_they_are_needed():
    program = (
        "import sys; from deepspeed.monitor.monitor import MonitorMaster; from deepspeed.config import DeepSpeedConfig;"
        "MonitorMaster(DeepSpeedConfig({'train_batch_size': 1}).monitor_config);"
        "names = ('wandb', 'comet_ml', 'tensorboard', 'torch.utils.tensorboard', 'rich');"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- a plugin's own -------------------------------------------------------------------------------------------------


def test_a_plugins_monitor_gets_its_arguments(plugin, lines):
    asked, recorder = [], Recorder()
    plugin(lambda name, arguments: asked.append((name, arguments)) or (recorder if name == "mine" else None))
    config = monitor_config(monitor_plugins={"mine": {"path": "x"}, "other": {"enabled": False}})
    master = MonitorMaster(config)
    assert master.enabled
    master.write_events(EVENTS)
    assert asked == [("mine", {"path": "x"})]
    assert recorder.events == EVENTS
    assert EVENTS
    master.close()  # it has no close, and needs none
    assert warnings(lines) == []


def test_a_plugin_is_asked_before_a_built_in_monitor(plugin, tmp_path):
    asked, recorder = [], Recorder()
    plugin(lambda name, arguments: asked.append((name, arguments["job_name"])) or recorder)
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    master = MonitorMaster(monitor_config(csv_monitor=section))
    assert asked == [("csv_monitor", "job")]
    assert master.csv_monitor is recorder
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_nobody_knows_is_told(lines):
    master = MonitorMaster(monitor_config(monitor_plugins={"mlflow": {}}))
    assert master.monitors == {}
    assert warnings(lines) == [
        "monitor mlflow: no installed plugin has a monitor of this name; install one, or remove it from monitor_plugins"
    ]


def test_a_plugin_that_fails_leaves_the_built_in_monitor(plugin, lines, tmp_path):
    def fail(name, arguments):
        raise RuntimeError("broken plugin")

    plugin(fail)
    master = MonitorMaster(monitor_config(csv_monitor={"enabled": True, "output_path": str(tmp_path)}))
    assert list(master.monitors) == ["csv_monitor"]
    assert warnings(lines) == [
        "monitor csv_monitor: a plugin failed in ds_monitor: RuntimeError: broken plugin; its monitor is left out"
    ]


def test_the_section_is_an_object_of_objects(lines):
    with pytest.raises(ConfigError, match="monitor_plugins: found 3; allowed: an object"):
        monitor_config(monitor_plugins={"mine": 3})
    monitor_config(monitor_plugins={"mine": {"whatever": [1]}})
    assert warnings(lines) == []


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "module", "requirement"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("comet", "comet_ml", "comet_ml"),
    ],
)
def test_a_missing_package_is_named_and_left_out(monkeypatch, lines, tmp_path, section, module, requirement):
    monkeypatch.setitem(sys.modules, module, None)
    sections = {section: {"enabled": True}, "csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    master = MonitorMaster(monitor_config(**sections))
    assert list(master.monitors) == ["csv_monitor"]
    (told,) = warnings(lines)
    assert told.startswith(f"monitor {section}: is enabled and cannot be imported (")
    assert told.endswith(f"); pip install {requirement}; training goes on without it")


def test_a_monitor_that_cannot_start_is_left_out(lines, tmp_path):
    (tmp_path / "file").write_text("")
    master = MonitorMaster(monitor_config(csv_monitor={"enabled": True, "output_path": str(tmp_path / "file")}))
    assert (master.enabled, master.monitors) == (True, {})
    (told,) = warnings(lines)
    assert told.startswith("monitor csv_monitor: could not be started: NotADirectoryError: ")
    assert told.endswith("; training goes on without it")


def test_a_write_that_fails_is_told_once_and_others_are_written(plugin, lines):
    recorder = Recorder()
    plugin(lambda name, arguments: {"bad": Broken(), "worse": Broken(), "good": recorder}[name])
    master = MonitorMaster(monitor_config(monitor_plugins={"bad": {}, "worse": {}, "good": {}}))
    for _ in range(3):
        master.write_events(EVENTS)
    assert recorder.events == EVENTS * 3
    assert warnings(lines) == [
        f"monitor {name}: writing failed: OSError: no space left; training goes on, later failures are not shown"
        for name in ("bad", "worse")
    ]


def test_a_write_that_failed_is_tried_again(plugin):
    class Recovering(Recorder):
        def write_events(self, events):
            self.write_events = super().write_events
            raise OSError("for a moment")

    recovering = Recovering()
    plugin(lambda name, arguments: recovering)
    master = MonitorMaster(monitor_config(monitor_plugins={"mine": {}}))
    master.write_events(EVENTS)
    master.write_events(EVENTS)
    assert recovering.events == EVENTS


def test_an_end_that_fails_is_told(plugin, lines):
    class Unending(Recorder):
        def close(self):
            raise RuntimeError("never")

    plugin(lambda name, arguments: Unending())
    MonitorMaster(monitor_config(monitor_plugins={"mine": {}})).close()
    assert warnings(lines) == ["monitor mine: closing failed: RuntimeError: never"]


def test_an_interrupt_is_not_swallowed(plugin):
    class Interrupted:
        def write_events(self, events):
            raise KeyboardInterrupt

    plugin(lambda name, arguments: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        MonitorMaster(monitor_config(monitor_plugins={"mine": {}})).write_events(EVENTS)


@pytest.mark.parametrize("config", [{}, {"csv_monitor": {"enabled": True}}, None, "csv", DeepSpeedConfig])
def test_what_is_no_configuration_is_said(config):
    with pytest.raises(ConfigError, match=r"^MonitorMaster: found a .*; give the monitor_config of a DeepSpeedConfig"):
        MonitorMaster(config)


@pytest.mark.parametrize("kind", [TensorBoardMonitor, WandbMonitor, CometMonitor, csvMonitor])
def test_a_monitor_alone_needs_its_section(kind):
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}: found a dict; give .*monitor_config\.{kind.section}$"):
        kind({"enabled": True})
    kind(getattr(monitor_config(), kind.section))
