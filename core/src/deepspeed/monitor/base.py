"""`Monitor`: the contract of one place that events are written to, and what an event is."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from deepspeed import comm
from deepspeed.errors import ConfigError
from deepspeed.log import own_rank

#: name, value (a number, or a tensor with one element), and where it stands on the x axis
Event = tuple[str, Any, int]


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
