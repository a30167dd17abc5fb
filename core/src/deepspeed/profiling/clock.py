"""Stopwatches: the host's clock, or a device's own events, which measure without making anybody wait.

Made by `create_stopwatch` for the timers in `timer.py` and `throughput.py`.
"""

import time
from collections import deque
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator


class Stopwatch(Protocol):
    """Measures spans, one at a time."""

    def start(self) -> None:
        """Begin a span."""

    def stop(self) -> None:
        """End it."""

    def collect(self, wait: bool) -> list[float]:
        """Milliseconds of the spans that ended since the last call, in order.

        Args:
            wait: for the device, where it has not come to the end of the last span; else those are left for later.
        """


class HostStopwatch:
    """Reads the host's clock.

    Args:
        synchronizes: wait for the device at both ends. A device that works while the host goes on is else measured by
            the time it takes to give it work.
    """

    def __init__(self, synchronizes: bool) -> None:
        self._synchronizes = synchronizes
        self._start_s = 0.0
        self._spans_ms: list[float] = []

    def start(self) -> None:
        self._start_s = self._now_s()

    def stop(self) -> None:
        self._spans_ms.append((self._now_s() - self._start_s) * 1e3)

    def collect(self, wait: bool) -> list[float]:
        spans_ms, self._spans_ms = self._spans_ms, []
        return spans_ms

    def _now_s(self) -> float:
        if self._synchronizes:
            get_accelerator().synchronize()
        return time.perf_counter()


class EventStopwatch:
    """Records device events on the current stream; only `collect(wait=True)` waits for them."""

    def __init__(self) -> None:
        self._event_class = get_accelerator().Event
        self._start: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def start(self) -> None:
        self._start = self._recorded()

    def stop(self) -> None:
        self._pending.append((self._start, self._recorded()))

    def collect(self, wait: bool) -> list[float]:
        spans_ms = []
        while self._pending:
            start, end = self._pending[0]
            if wait:
                end.synchronize()
            elif not end.query():
                break
            spans_ms.append(float(start.elapsed_time(end)))
            self._pending.popleft()
        return spans_ms

    def _recorded(self) -> Any:
        event = self._event_class(enable_timing=True)
        event.record()
        return event


def create_stopwatch(synchronized: bool = True) -> Stopwatch:
    """The stopwatch for the current accelerator.

    Args:
        synchronized: count the device's time; False reads the host's clock and never waits.
    """
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device() or not synchronized:
        return HostStopwatch(synchronizes=False)
    if accelerator.use_host_timers():
        return HostStopwatch(synchronizes=True)
    try:
        return EventStopwatch()
    except NotImplementedError:  # torch has no events for this device
        return HostStopwatch(synchronizes=True)
