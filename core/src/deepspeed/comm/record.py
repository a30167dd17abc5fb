"""The comms logger: per operation and message size, how often it was called and how long the caller waited.

`comm.py` reports every collective here while recording is on (config section `comms_logger`, or `comm.configure`).
Durations are what the calling host sees: a call with `async_op=True` counts the time to start it.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from deepspeed.log import log_dist, logger

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class OpRecord:
    """One row: an operation at one message size."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, duration_s: float) -> None:
        """Count one call."""
        self.count += 1
        self.total_s += duration_s
        self.max_s = max(self.max_s, duration_s)


class CommsLogger:
    """What is recorded, and the rows so far: `rows[op][num_bytes]`."""

    def __init__(self) -> None:
        self.enabled = False
        self.verbose = False
        self.prof_all = True
        self.prof_ops: frozenset[str] = frozenset()
        self.rows: dict[str, dict[int, OpRecord]] = {}

    def configure(
        self,
        enabled: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: list[str] | None = None,
        verbose: bool | None = None,
    ) -> None:
        """Change what is given; None leaves a setting as it is."""
        self.enabled = self.enabled if enabled is None else enabled
        self.prof_all = self.prof_all if prof_all is None else prof_all
        self.prof_ops = self.prof_ops if prof_ops is None else frozenset(prof_ops)
        self.verbose = self.verbose if verbose is None else verbose

    def wants(self, op: str, prof: bool) -> bool:
        """True if this call is to be recorded; `prof` is the caller's own wish."""
        return self.enabled and (self.prof_all or prof or op in self.prof_ops)

    def add(self, op: str, num_bytes: int, duration_s: float) -> None:
        """Record one call."""
        self.rows.setdefault(op, {}).setdefault(num_bytes, OpRecord()).add(duration_s)
        if self.verbose:
            log_dist(f"comm {op}: {num_bytes} bytes in {duration_s * 1e3:.3f} ms", ranks=[-1])

    def reset(self) -> None:
        """Forget the rows."""
        self.rows.clear()

    def table(self) -> str:
        """The rows as text, one line per operation and size."""
        lines = [f"{'operation':<28}{'bytes':>14}{'count':>8}{'total ms':>12}{'mean ms':>10}{'max ms':>10}{'GB/s':>8}"]
        for op in sorted(self.rows):
            for num_bytes, row in sorted(self.rows[op].items()):
                mean_s = row.total_s / row.count
                rate = num_bytes / mean_s / 1e9 if mean_s > 0 else 0.0
                lines.append(
                    f"{op:<28}{num_bytes:>14}{row.count:>8}{row.total_s * 1e3:>12.2f}{mean_s * 1e3:>10.3f}"
                    f"{row.max_s * 1e3:>10.3f}{rate:>8.2f}"
                )
        return "\n".join(lines)


comms_logger = CommsLogger()


def recorded(function: _F) -> _F:
    """Decorator of a public operation. Adds DeepSpeed's arguments `prof`, `log_name` and `debug`.

    When recording is off this costs one attribute test.
    """
    op = function.__name__

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str | None = None, debug: Any = None, **kwargs: Any) -> Any:
        if not comms_logger.enabled or not comms_logger.wants(op, prof):
            return function(*args, **kwargs)
        start = time.perf_counter()
        result = function(*args, **kwargs)
        comms_logger.add(
            log_name or op, _num_bytes(args) or _num_bytes(tuple(kwargs.values())), time.perf_counter() - start
        )
        return result

    return call  # type: ignore[return-value]


def log_summary(show_straggler: bool = False) -> str:
    """Log the table on rank 0 and return it. Called by users at the end of training.

    With `show_straggler` every rank logs its own table: the rank that waited least is the one others waited for.
    """
    if not comms_logger.enabled:
        logger.warning("comm.log_summary: nothing was recorded; set comms_logger.enabled in the config first")
    table = comms_logger.table()
    log_dist(f"communication so far\n{table}", ranks=[-1] if show_straggler else [0])
    return table


def _num_bytes(values: tuple[Any, ...]) -> int:
    """Bytes of the largest tensor or list of tensors: the whole message of a gather or scatter."""
    largest = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            size = sum(t.numel() * t.element_size() for t in value if isinstance(t, torch.Tensor))
        else:
            continue
        largest = max(largest, size)
    return largest
