"""`MonitorMaster`: every monitor of a configuration as one, and what happens when one of them fails."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.config.base import Section
from deepspeed.config.monitor import MonitorConfig
from deepspeed.errors import ConfigError
from deepspeed.log import logger
from deepspeed.monitor.base import Event, Monitor, is_writer
from deepspeed.plugins.manager import plugin_manager

__all__ = ["Event", "Monitor", "MonitorMaster"]

# section -> its module and class, and what has to be installed for it; a module is imported when its section is on
_BUILT_IN = {
    "tensorboard": ("deepspeed.monitor.tensorboard", "TensorBoardMonitor", "tensorboard"),
    "wandb": ("deepspeed.monitor.wandb", "WandbMonitor", "wandb"),
    "comet": ("deepspeed.monitor.comet", "CometMonitor", "comet_ml"),
    "csv_monitor": ("deepspeed.monitor.csv_monitor", "csvMonitor", ""),
}


class MonitorMaster:
    """Writes events to each monitor that the configuration switches on. `engine.monitor` is one; users make others.

    The monitors exist on rank 0 only. For each name plugins are asked first (hook `ds_monitor`), then the built-in
    ones. One that cannot be made is left out, one that fails in writing is tried again next time; both are reported
    once, with the section's name, and training goes on.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`.

    Attributes:
        enabled: whether the configuration switches any monitor on; the same on every rank.
        monitors: name of the section -> monitor, as far as this process writes.

    Raises:
        ConfigError: it is something else, as a dict.
    """

    def __init__(self, monitor_config: MonitorConfig) -> None:
        if not isinstance(monitor_config, MonitorConfig):
            raise ConfigError(
                f"MonitorMaster: found a {type(monitor_config).__name__}; give the monitor_config of a "
                "DeepSpeedConfig, as in MonitorMaster(DeepSpeedConfig(config).monitor_config)"
            )
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        self.monitors: dict[str, Any] = {}
        self._failing: set[str] = set()
        if not is_writer():
            return
        for name, section in monitor_config.asked_for().items():
            monitor = self._create(name, section)
            if monitor is not None:
                self.monitors[name] = monitor

    @property
    def is_writing(self) -> bool:
        """Whether events written in this process go anywhere; False: making them is in vain."""
        return bool(self.monitors)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write `(name, value, step)` events everywhere; never raises what a monitor raises."""
        for name, monitor in self.monitors.items():
            try:
                monitor.write_events(list(event_list))
            except Exception as error:  # noqa: BLE001 - a monitor does not stop training
                if name not in self._failing:
                    self._failing.add(name)
                    _warn(name, f"writing failed: {_told(error)}; training goes on, later failures are not shown")

    def close(self) -> None:
        """End every monitor. Called by `engine.destroy`; nothing can be written afterwards."""
        monitors, self.monitors = self.monitors, {}
        for name, monitor in monitors.items():
            try:
                getattr(monitor, "close", _nothing)()
            except Exception as error:  # noqa: BLE001 - nor does its end
                _warn(name, f"closing failed: {_told(error)}")

    # The monitors by the names that DeepSpeed gives them; None where one is off, failed, or does not write here.

    @property
    def tb_monitor(self) -> Any:
        return self.monitors.get("tensorboard")

    @property
    def wandb_monitor(self) -> Any:
        return self.monitors.get("wandb")

    @property
    def comet_monitor(self) -> Any:
        return self.monitors.get("comet")

    @property
    def csv_monitor(self) -> Any:
        return self.monitors.get("csv_monitor")

    # ---- making them --------------------------------------------------------------------------------------------

    def _create(self, name: str, section: Section | dict[str, Any]) -> Any:
        offered = self._offered(name, section.model_dump() if isinstance(section, Section) else section)
        if offered is not None:
            return offered
        if name not in _BUILT_IN:
            _warn(name, "no installed plugin has a monitor of this name; install one, or remove it from "
                               "monitor_plugins")  # fmt: skip
            return None
        module, class_name, requirement = _BUILT_IN[name]
        try:
            return getattr(importlib.import_module(module), class_name)(section)
        except ImportError as error:
            _warn(name, f"is enabled and cannot be imported ({error}); pip install {requirement}; training "
                               "goes on without it")  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a monitor does not stop training
            _warn(name, f"could not be started: {_told(error)}; training goes on without it")
        return None

    def _offered(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """A plugin's monitor, if one has any under this name."""
        try:
            return plugin_manager().hook.ds_monitor(name=name, arguments=dict(arguments))
        except Exception as error:  # noqa: BLE001 - nor does a plugin
            _warn(name, f"a plugin failed in ds_monitor: {_told(error)}; its monitor is left out")
            return None


def _warn(name: str, what: str) -> None:
    logger.warning(f"monitor {name}: {what}")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """What a plugin's monitor without `close` does at its end."""
