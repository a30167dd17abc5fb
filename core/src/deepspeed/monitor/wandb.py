"""`WandbMonitor`: a run of Weights & Biases. `WANDB_MODE=offline` keeps it on this machine."""

from collections.abc import Sequence
from typing import Any

from deepspeed._absent_members import absent_members
from deepspeed.config.monitor import WandbConfig
from deepspeed.monitor.base import Event, Monitor, as_number, is_writer


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
