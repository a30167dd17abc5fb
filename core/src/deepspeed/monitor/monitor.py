"""`MonitorMaster`: combines all monitors of a configuration, and handles their failures.

`Monitor` is the interface of one monitor. The built-in ones write to TensorBoard, CSV files, Weights & Biases and
Comet; a package is imported when the first monitor that needs it is created. `step_events` are the events that the
engine writes after each step.
"""

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from deepspeed import comm
from deepspeed._absent import absent_members
from deepspeed.config.base import Section
from deepspeed.config.monitor import CometConfig, CSVConfig, MonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.errors import ConfigError
from deepspeed.log import logger, own_rank
from deepspeed.plugins.manager import plugin_manager

__all__ = ["Event", "Monitor", "MonitorMaster"]

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
        made_by, requirement = _BUILT_IN[name]
        try:
            return made_by(section)
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


@absent_members("monitor.tensorboard:TensorBoardMonitor")
class TensorBoardMonitor(Monitor):
    """Writes scalars to `output_path/job_name`; `tensorboard --logdir output_path` shows them.

    Args:
        tensorboard_config: the section `tensorboard`.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    section = "tensorboard"

    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        super().__init__(tensorboard_config)
        self.enabled = tensorboard_config.enabled and is_writer()
        self.log_dir = folder_of(tensorboard_config)
        self.summary_writer: Any = None
        if self.enabled:
            from torch.utils.tensorboard import SummaryWriter  # late: it is slow, and an extra

            self.summary_writer = SummaryWriter(log_dir=self.log_dir)  # type: ignore[no-untyped-call]

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write scalars. With `flush` they are on disk afterwards."""
        if self.summary_writer is None:
            return
        for name, value, step in event_list:
            self.summary_writer.add_scalar(name, as_number(value), step)
        if flush:
            self.summary_writer.flush()

    def close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()


@absent_members("monitor.csv_monitor:csvMonitor")
class csvMonitor(Monitor):
    """Appends to `output_path/job_name/<event name>.csv`, with `_` for `/` and spaces of the name.

    The first line is `step,<last part of the name>`. A run with the folder of an earlier run appends to its files. Each
    row is on disk when `write_events` returns.

    Args:
        csv_config: the section `csv_monitor`.

    Raises:
        OSError: the folder cannot be created.
    """

    section = "csv_monitor"

    def __init__(self, csv_config: CSVConfig) -> None:
        super().__init__(csv_config)
        self.enabled = csv_config.enabled and is_writer()
        self.log_dir = folder_of(csv_config)
        if self.enabled:
            os.makedirs(self.log_dir, exist_ok=True)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Append one row per event."""
        if not self.enabled:
            return
        for name, value, step in event_list:
            # Open the file per row: a killed run loses nothing, and a file that was moved away is created again.
            path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([step, as_number(value)])


@absent_members("monitor.wandb:WandbMonitor")
class WandbMonitor(Monitor):
    """Logs to one W&B run, with one call per step.

    Args:
        wandb_config: the section `wandb`; `team` is W&B's entity.

    Raises:
        ImportError: the package wandb is not installed.
        Exception: raised by `wandb.init`, for example without a login.
    """

    section = "wandb"

    def __init__(self, wandb_config: WandbConfig) -> None:
        super().__init__(wandb_config)
        self.enabled = wandb_config.enabled and is_writer()
        self.run: Any = None
        if self.enabled:
            import wandb

            self.run = wandb.init(project=wandb_config.project, group=wandb_config.group, entity=wandb_config.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Call `wandb.log` of this run. W&B requires ascending steps and drops data of earlier steps."""
        if self.run is not None:
            self.run.log(data, step=step, commit=commit)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log events, one call per step."""
        by_step: dict[int, dict[str, Any]] = {}
        for name, value, step in event_list:
            by_step.setdefault(step, {})[name] = as_number(value)
        for step in sorted(by_step):
            self.log(by_step[step], step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None


# Keys of the section that are passed to `comet_ml.start` if set; Comet's defaults and environment provide the rest.
_START_KEYS = ("api_key", "workspace", "project", "experiment_key", "mode", "online")


class CometMonitor(Monitor):
    """Logs metrics to one Comet experiment, each name at most once per `samples_log_interval` samples.

    Args:
        comet_config: the section `comet`.

    Raises:
        ImportError: the package comet_ml is not installed.
        Exception: raised by `comet_ml.start`, for example without an API key.
    """

    section = "comet"

    def __init__(self, comet_config: CometConfig) -> None:
        super().__init__(comet_config)
        self.enabled = comet_config.enabled and is_writer()
        self.samples_log_interval = comet_config.samples_log_interval
        self._logged_at: dict[str, int] = {}
        self._experiment: Any = None
        if self.enabled:
            import comet_ml

            said = {name: getattr(comet_config, name) for name in _START_KEYS}
            self._experiment = comet_ml.start(**{name: value for name, value in said.items() if value is not None})
            if comet_config.experiment_name is not None:
                self._experiment.set_name(comet_config.experiment_name)

    @property
    def experiment(self) -> Any:
        """Comet's experiment; None on ranks that do not write."""
        return self._experiment

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log the events that are due; steps are numbers of samples."""
        if self._experiment is None:
            return
        for name, value, step in event_list:
            last = self._logged_at.get(name)
            if last is None or step - last >= self.samples_log_interval:
                self._logged_at[name] = step
                self._experiment.log_metric(name=name, value=as_number(value), step=step)

    def close(self) -> None:
        if self._experiment is not None:
            self._experiment.end()
            self._experiment = None


# section -> its monitor, and the package that it requires
_BUILT_IN: Mapping[str, tuple[type[Monitor], str]] = {
    "tensorboard": (TensorBoardMonitor, "tensorboard"),
    "wandb": (WandbMonitor, "wandb"),
    "comet": (CometMonitor, "comet_ml"),
    "csv_monitor": (csvMonitor, ""),
}
