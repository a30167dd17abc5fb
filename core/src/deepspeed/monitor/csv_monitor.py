"""`csvMonitor`: one CSV file per event name."""

import csv
import os
from collections.abc import Sequence

from deepspeed._absent_members import absent_members
from deepspeed.config.monitor import CSVConfig
from deepspeed.monitor.base import Event, Monitor, as_number, folder_of, is_writer


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
