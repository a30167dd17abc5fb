"""The built-in monitors: TensorBoard, CSV files, Weights & Biases, Comet.

A package is imported when the first monitor that needs it is created.
"""

import csv
import os
from collections.abc import Sequence
from typing import Any

from deepspeed._absent_members import absent_members
from deepspeed.config.monitor import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor.monitor import Event, Monitor, as_number, folder_of, is_writer


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
