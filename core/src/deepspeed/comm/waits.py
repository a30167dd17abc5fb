"""How long this rank has waited for others: `watch.slow_rank_window` subtracts it from the time of a step.

Whatever waits for a peer in a step does so inside of `waited`: collectives of ZeRO and messages of pipelines
(`record.py`, `point_to_point.py`), sums of hosts, and the synchronous operations of `deepspeed.comm`. On a device that
works while the host goes on, what is measured is how long its current stream stood still.
"""

import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from deepspeed.profiling.timer import Stopwatch, create_stopwatch

_T = TypeVar("_T")


class Waits:
    """The waits of this process. While nobody watches, a wait costs no look at the clock."""

    def __init__(self) -> None:
        self._watchers: WeakSet[object] = WeakSet()
        self._stopwatch: Stopwatch | None = None
        self._depth = 0
        self._total_ms = 0.0
        self._thread = 0  # that makes the steps; others hold nobody up

    @property
    def is_watched(self) -> bool:
        """Whether anybody asks for the waits."""
        return len(self._watchers) > 0

    def watch(self, watcher: object) -> None:
        """Measure from now on, in this thread, as long as `watcher` lives or until it calls `unwatch`."""
        self._watchers.add(watcher)
        self._thread = threading.get_ident()
        if self._stopwatch is None:
            self._stopwatch = create_stopwatch()

    def unwatch(self, watcher: object) -> None:
        """It asks no more."""
        self._watchers.discard(watcher)

    def begin(self) -> bool:
        """A wait begins. Waits may lie in one another.

        Returns:
            Whether `end` is to be called.
        """
        if not self.is_watched or threading.get_ident() != self._thread:
            return False
        self._depth += 1
        if self._depth == 1 and self._stopwatch is not None:
            self._stopwatch.start()
        return True

    def end(self) -> None:
        """It is over."""
        self._depth -= 1
        if self._depth == 0 and self._stopwatch is not None:
            self._stopwatch.stop()

    def total_ms(self, *, wait: bool) -> float:
        """Milliseconds of all waits so far.

        Args:
            wait: for the device; else its last answers may be missing.
        """
        if self._stopwatch is not None:
            self._total_ms += sum(self._stopwatch.collect(wait))
        return self._total_ms


waits = Waits()


def waited(call: Callable[[], _T]) -> _T:
    """`call()`, which waits for peers: `waits` counts it."""
    is_counted = waits.begin()
    try:
        return call()
    finally:
        if is_counted:
            waits.end()
