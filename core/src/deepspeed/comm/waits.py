"""How long this rank has waited for others: `watch.slow_rank_window` subtracts it from the time of a step.

Whatever waits for a peer in a step does so between `waits.begin()` and `waits.end()`: collectives of ZeRO and messages
of pipelines (`record.py`, `point_to_point.py`), sums of hosts, and the synchronous operations of `deepspeed.comm`. On a
device that works while the host goes on, what is measured is how long its current stream stood still.
"""

import threading

from deepspeed.profiling.clock import Stopwatch, create_stopwatch


class Waits:
    """The waits of this process. While nobody watches it costs a test of an attribute."""

    def __init__(self) -> None:
        self.is_watched = False
        self._num_watchers = 0
        self._stopwatch: Stopwatch | None = None
        self._depth = 0
        self._total_ms = 0.0
        self._thread = 0  # that makes the steps; others hold nobody up

    def watch(self) -> None:
        """Measure from now on, in this thread."""
        self._num_watchers += 1
        self.is_watched = True
        self._thread = threading.get_ident()
        if self._stopwatch is None:
            self._stopwatch = create_stopwatch()

    def unwatch(self) -> None:
        """A watcher is gone."""
        self._num_watchers -= 1
        self.is_watched = self._num_watchers > 0

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
