"""`SynchronizedWallClockTimer` and `ThroughputTimer`, as documented at `deepspeed.utils.timer`.

    timers = SynchronizedWallClockTimer()
    timers("data").start()
    ...
    timers("data").stop()
    timers.log(["data"])                    # time (ms) | data: 12.34

Nothing waits for the device before a time is read, where the device has events (`clock.py`). The engine's own timers
are `engine.timers`, by the names below; `breakdown.py` prints them.
"""

from collections import deque
from collections.abc import Sequence

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import StateError
from deepspeed.log import report
from deepspeed.profiling.clock import create_stopwatch
from deepspeed.profiling.throughput import ThroughputTimer

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "STEP_GLOBAL_TIMER",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "trim_mean",
]

FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_GLOBAL_TIMER = "step"

_GIB = 2**30
#: spans that a timer keeps for its mean
_KEPT_SPANS = 1000


class NamedTimer:
    """One named timer of a `SynchronizedWallClockTimer`; adds up spans between `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._stopwatch = create_stopwatch()
        self._elapsed_ms = 0.0
        self._spans_ms: deque[float] = deque(maxlen=_KEPT_SPANS)

    def start(self) -> None:
        """Begin a span.

        Raises:
            StateError: one is running.
        """
        if self.started_:
            raise StateError(f"timer {self.name_!r} has already been started; stop it first")
        self._stopwatch.start()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the span and add it.

        Args:
            reset: forget the spans before this one.
            record: accepted for old scripts; every span is kept for `mean`.

        Raises:
            StateError: none is running.
        """
        if not self.started_:
            raise StateError(f"timer {self.name_!r} is not started; start it first")
        if reset:
            self.reset()
        self._stopwatch.stop()
        self.started_ = False
        self._add(wait=False)

    def reset(self) -> None:
        """Forget every span; a running one goes on."""
        self._stopwatch.collect(wait=True)
        self._elapsed_ms = 0.0
        self._spans_ms.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of all spans, a running one up to now. Waits for the device.

        Args:
            reset: start again.
        """
        is_running = self.started_
        if is_running:
            self.stop()
        self._add(wait=True)
        elapsed_ms = self._elapsed_ms
        if reset:
            self.reset()
        if is_running:
            self.start()
        return elapsed_ms

    def mean(self) -> float:
        """Mean span in milliseconds since the last reset, without the tenth that is shortest and the longest tenth."""
        self._add(wait=True)
        return trim_mean(list(self._spans_ms), 0.1)

    def _add(self, wait: bool) -> None:
        spans_ms = self._stopwatch.collect(wait)
        self._elapsed_ms += sum(spans_ms)
        self._spans_ms.extend(spans_ms)


class SynchronizedWallClockTimer:
    """Named timers, each made when it is first asked for: `timers("fwd").start()`."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        if name not in self.timers:
            self.timers[name] = NamedTimer(name)
        return self.timers[name]

    def has_timer(self, name: str) -> bool:
        """Whether it was ever asked for."""
        return name in self.timers

    def get_timers(self) -> dict[str, NamedTimer]:
        """All of them, by name."""
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of the timers called `names`, in one line; names without a timer are left out.

        Args:
            normalizer: what each is divided by, for example a number of steps.
            reset: start again.
            memory_breakdown: add the device's memory.
            ranks: global ranks that print; None is rank 0.
        """
        _check_normalizer(normalizer)
        times = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        if memory_breakdown:
            times.append(self.memory_usage())
        report("time (ms) | " + " | ".join(times), None if ranks is None else tuple(ranks))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean span of each timer in milliseconds, divided by `normalizer`."""
        _check_normalizer(normalizer)
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    @staticmethod
    def memory_usage() -> str:
        """The device's memory in one line, in GiB."""
        accelerator = get_accelerator()
        return (
            f"mem allocated: {accelerator.memory_allocated() / _GIB:.4f} GiB, "
            f"peak: {accelerator.max_memory_allocated() / _GIB:.4f} GiB"
        )


class NoopTimer:
    """In the place of timers that are off: everything can be called and nothing happens."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Begin nothing."""

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """End nothing."""

        def reset(self) -> None:
            """Forget nothing."""

        def elapsed(self, reset: bool = True) -> float:
            """Nothing passed."""
            return 0.0

        def mean(self) -> float:
            """The mean of nothing."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> "NoopTimer.Timer":
        return self.timer

    def has_timer(self, name: str) -> bool:
        """True, so that what is asked for can be called."""
        return True

    def get_timers(self) -> dict[str, NamedTimer]:
        """None of them counts."""
        return {}

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print nothing."""

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of nothing."""
        return {}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Mean of `data` without its smallest and largest share `trim_percent`; 0 for no data.

    Raises:
        ValueError: `trim_percent` is not in [0, 0.5).
    """
    if not 0.0 <= trim_percent < 0.5:
        raise ValueError(f"trim_mean: trim_percent is {trim_percent}; allowed: 0 <= trim_percent < 0.5")
    if not data:
        return 0.0
    num_cut = int(len(data) * trim_percent)
    kept = sorted(data)[num_cut : len(data) - num_cut]
    return sum(kept) / len(kept)


def _check_normalizer(normalizer: float) -> None:
    if not normalizer > 0.0:
        raise ValueError(f"normalizer: found {normalizer}; allowed: a number > 0")
