"""`MonitorMaster`: every monitor of a configuration as one, and what happens when one of them fails.

`Monitor` is the contract of one place that events are written to; `services.py` has the built-in ones.
`step_events` are what the engine writes by itself after each step.
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

# section -> the module and class of its monitor, and what has to be installed for it
_BUILT_IN = {
    "tensorboard": ("deepspeed.monitor.services", "TensorBoardMonitor", "tensorboard"),
    "wandb": ("deepspeed.monitor.services", "WandbMonitor", "wandb"),
    "comet": ("deepspeed.monitor.services", "CometMonitor", "comet_ml"),
    "csv_monitor": ("deepspeed.monitor.services", "csvMonitor", ""),
}


#: name, value (a number, or a tensor with one element), and where it stands on the x axis
Event = tuple[str, Any, int]

#: before the names of a step's events, as DeepSpeed documents them
PREFIX = "Train/Samples/"


class Monitor(ABC):
    """Something that events are written to. A plugin's monitor needs `write_events` only.

    A subclass is made from its section of the configuration, on rank 0 if that is switched on; elsewhere it stays
    `enabled = False` and does nothing.
    """

    enabled: bool = True

    #: the section of `monitor_config` that a built-in monitor is made from; "" for a plugin's, which takes a dict
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
        """Write events. Called once per step by the engine, and by users whenever they like."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Write out what is still held back. Called by `engine.destroy`."""


def is_writer() -> bool:
    """Whether this process writes: global rank 0, by the process group or else by the launcher's environment."""
    rank = comm.get_rank() if comm.is_initialized() else own_rank()
    return rank == 0


def as_number(value: Any) -> Any:
    """A tensor's (or array's) one element as a Python number; a number as it is."""
    return value.item() if hasattr(value, "item") else value


def folder_of(section: Any) -> str:
    """`output_path/job_name` of a section; without a path it is below the working directory."""
    return os.path.join(os.path.expanduser(section.output_path or ""), section.job_name)


def step_events(
    samples: int,
    *,
    loss: Any = None,
    lr: float | None = None,
    loss_scale: float | None = None,
    times_ms: Mapping[str, float] | None = None,
) -> list[Event]:
    """The events of one step. Called by the engine's observers where a monitor writes.

    Args:
        samples: samples seen by all ranks so far, this step's included: the x axis.
        loss: mean loss of the step's micro-batches on this rank; None if the engine did not see it.
        lr: learning rate of the first parameter group.
        loss_scale: the scale that this step's losses had; None where losses are not scaled.
        times_ms: phase -> milliseconds of the step, for example `{"forward": 1.5}`.
    """
    figures = {"train_loss": loss, "lr": lr, "loss_scale": loss_scale}
    figures |= {f"elapsed_time_ms_{phase}": elapsed for phase, elapsed in (times_ms or {}).items()}
    return [(PREFIX + name, value, samples) for name, value in figures.items() if value is not None]


class MonitorMaster:
    """Writes events to each monitor that the configuration switches on. `engine.monitor` is one; users make others.

    The monitors exist on rank 0 only. For each name plugins are asked first (hook `ds_monitor`), then the built-in
    ones. One that cannot be made is left out, one that fails in writing is tried again next time; both are reported
    once, with the section's name, and training goes on.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`.

    Attributes:
        enabled: whether the configuration switches any monitor on; the same on every rank.
        monitors: name of the section -> monitor, as far as this process writes; where it is empty, making events is
            in vain.

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
    """Do nothing, at the end of a plugin's monitor that has no `close`."""
