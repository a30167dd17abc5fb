"""The built-in monitors: TensorBoard, CSV files, Weights & Biases, Comet.

A package is imported when the first monitor that needs it is made.
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
    """Writes scalars below `output_path/job_name`: `tensorboard --logdir output_path` shows them.

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
        """Write scalars; with `flush` they are on disk afterwards."""
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
    """Appends to `output_path/job_name/<event name>.csv`, where `/` and spaces of the name are `_`.

    The first line is `step,<last part of the name>`; a run that goes on with an earlier one's folder appends to its
    files. Each row is on disk when `write_events` returns.

    Args:
        csv_config: the section `csv_monitor`.

    Raises:
        OSError: the folder cannot be made.
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
            # Opened per row: a killed run loses nothing, and a file that was moved away is started again.
            path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([step, as_number(value)])


@absent_members("monitor.wandb:WandbMonitor")
class WandbMonitor(Monitor):
    """Logs to one run, events of one step together.

    Args:
        wandb_config: the section `wandb`; `team` is what W&B calls the entity.

    Raises:
        ImportError: the package wandb is not installed.
        Exception: what `wandb.init` raises, for example without a login.
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
        """`wandb.log` of this run. W&B takes steps in ascending order only and drops what comes late."""
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


# What `comet_ml.start` is told, where the section says it; the rest is left to Comet's own defaults and environment.
_START_KEYS = ("api_key", "workspace", "project", "experiment_key", "mode", "online")


class CometMonitor(Monitor):
    """Logs metrics to one experiment, each name at most once in `samples_log_interval` samples.

    Args:
        comet_config: the section `comet`.

    Raises:
        ImportError: the package comet_ml is not installed.
        Exception: what `comet_ml.start` raises, for example without an API key.
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
        """Comet's experiment, None on ranks that do not write."""
        return self._experiment

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Log the events whose turn it is; steps are samples."""
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
