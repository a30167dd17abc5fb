"""`MonitorMaster`: combines all monitors of a configuration, and handles their failures.

`Monitor` is the interface of one monitor; `services.py` has the built-in ones. `step_events` are the events that the
engine writes after each step.
"""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from deepspeed import comm
from deepspeed.config.base import Section
from deepspeed.config.monitor import MonitorConfig
from deepspeed.errors import ConfigError
from deepspeed.log import logger, own_rank
from deepspeed.plugins.manager import plugin_manager

__all__ = ["Event", "Monitor", "MonitorMaster"]

# section -> module and class of its monitor, and the package that it requires
_BUILT_IN = {
    "tensorboard": ("deepspeed.monitor.services", "TensorBoardMonitor", "tensorboard"),
    "wandb": ("deepspeed.monitor.services", "WandbMonitor", "wandb"),
    "comet": ("deepspeed.monitor.services", "CometMonitor", "comet_ml"),
    "csv_monitor": ("deepspeed.monitor.services", "csvMonitor", ""),
}


#: (name, value (a number, or a tensor with one element), position on the x axis)
Event = tuple[str, Any, int]

#: prefix of the names of a step's events, as documented by DeepSpeed
PREFIX = "Train/Samples/"


class Monitor(ABC):
    """The base class of monitors. A plugin's monitor needs only `write_events`.

    A subclass is created from its section of the configuration. If the section is disabled, or the rank is not 0, it
    sets `enabled = False` and does nothing.
    """

    enabled: bool = True

    #: the section of `monitor_config` for a built-in monitor; "" for a plugin's monitor, which takes a dict
    section: ClassVar[str] = ""

    def __init__(self, monitor_config: Any) -> None:
        if self.section and not hasattr(monitor_config, "enabled"):
            raise ConfigError(
                f"{type(self).__name__}: found a {type(monitor_config).__name__}; give the section of a "
                f"DeepSpeedConfig, as in DeepSpeedConfig(config).monitor_config.{self.section}"
            )
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write events. The engine calls this once per step; users may call it at any time."""

    def close(self) -> None:  # noqa: B027 - most monitors have nothing to close
        """Flush pending events. Called by `engine.destroy`."""


def is_writer() -> bool:
    """Return whether this is global rank 0, by the process group or else by the launcher's environment."""
    rank = comm.get_rank() if comm.is_initialized() else own_rank()
    return rank == 0


def as_number(value: Any) -> Any:
    """Return the only element of a tensor (or array) as a Python number; return a number unchanged."""
    return value.item() if hasattr(value, "item") else value


def folder_of(section: Any) -> str:
    """Return `output_path/job_name` of a section; without `output_path`, relative to the working directory."""
    return os.path.join(os.path.expanduser(section.output_path or ""), section.job_name)


def step_events(
    samples: int,
    *,
    loss: Any = None,
    lr: float | None = None,
    loss_scale: float | None = None,
    times_ms: Mapping[str, float] | None = None,
) -> list[Event]:
    """Return the events of one step. The engine's observers call this if a monitor writes.

    Args:
        samples: number of samples of all ranks so far, including this step: the x axis.
        loss: mean loss of the step's micro-batches on this rank; None if unknown to the engine.
        lr: learning rate of the first parameter group.
        loss_scale: the loss scale of this step; None if losses are not scaled.
        times_ms: phase -> milliseconds of the step, for example `{"forward": 1.5}`.
    """
    figures = {"train_loss": loss, "lr": lr, "loss_scale": loss_scale}
    figures |= {f"elapsed_time_ms_{phase}": elapsed for phase, elapsed in (times_ms or {}).items()}
    return [(PREFIX + name, value, samples) for name, value in figures.items() if value is not None]


class MonitorMaster:
    """Writes events to each enabled monitor. `engine.monitor` is one; users may create others.

    The monitors exist only on rank 0. For each name, plugins are asked first (hook `ds_monitor`), then the built-in
    monitors. A monitor that cannot be created is left out. A monitor that fails to write is tried again for the next
    events. Both are reported once with the section's name, and training continues.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`.

    Attributes:
        enabled: whether the configuration enables any monitor; equal on all ranks.
        monitors: name of the section -> monitor. If it is empty, as on ranks other than 0, events are not needed.

    Raises:
        ConfigError: `monitor_config` is of another type, such as a dict.
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

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write `(name, value, step)` events to all monitors. Exceptions of monitors are not raised."""
        for name, monitor in self.monitors.items():
            try:
                monitor.write_events(list(event_list))
            except Exception as error:  # noqa: BLE001 - a monitor does not stop training
                if name not in self._failing:
                    self._failing.add(name)
                    _warn(name, f"writing failed: {_told(error)}; training goes on, later failures are not shown")

    def close(self) -> None:
        """Close every monitor. Called by `engine.destroy`. Events are not written afterwards."""
        monitors, self.monitors = self.monitors, {}
        for name, monitor in monitors.items():
            try:
                getattr(monitor, "close", _nothing)()
            except Exception as error:  # noqa: BLE001 - nor does its end
                _warn(name, f"closing failed: {_told(error)}")

    # The monitors under DeepSpeed's names; None if disabled, failed, or on a rank that does not write.

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

    # ---- creating monitors --------------------------------------------------------------------------------------

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
        """Return the monitor of the first plugin that provides this name, or None."""
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
    """Do nothing: a plugin's monitor may have no `close`."""
