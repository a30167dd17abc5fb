"""`TensorBoardMonitor`: event files for TensorBoard."""

from collections.abc import Sequence
from typing import Any

from deepspeed._absent_members import absent_members
from deepspeed.config.monitor import TensorBoardConfig
from deepspeed.monitor.base import Event, Monitor, as_number, folder_of, is_writer


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
