"""Streams and events of a device that is the host itself: every op has finished when its call returns.

They keep the shape of `torch.Stream` and `torch.Event`, so that code written for a device runs unchanged.
"""

import time
from types import TracebackType
from typing import Any

from deepspeed.errors import StateError

_NS_PER_MS = 1_000_000


class HostStream:
    """A queue that is always empty. Takes and ignores a device stream's arguments; use it with `with` or `stream()`."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """True: nothing is queued."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: the other stream's work is done."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for: what the event marks is done."""

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """Record `event`, or a new one, now."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class HostEvent:
    """A moment on the host's clock. Takes and ignores a device event's arguments; always measures time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """True: what came before is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds from this event to `end_event`.

        Raises:
            StateError: one of the two was not recorded.
        """
        if self._recorded_ns is None or end_event._recorded_ns is None:
            which = "start" if self._recorded_ns is None else "end"
            raise StateError(f"elapsed_time: the {which} event was not recorded; call record() on both first")
        return (end_event._recorded_ns - self._recorded_ns) / _NS_PER_MS
