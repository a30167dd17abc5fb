"""`SynchronizedWallClockTimer` and `ThroughputTimer`, as documented at `deepspeed.utils.timer`.

    timers = SynchronizedWallClockTimer()
    timers("data").start()
    ...
    timers("data").stop()
    timers.log(["data"])                    # time (ms) | data: 12.34

A `Stopwatch` reads the host's clock, or records device events if the device has them. With events, the host waits for
the device only when a time is read. The engine's timers are `engine.timers`, with the names below. `breakdown.py`
prints them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepspeed._absent import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import StateError
from deepspeed.log import log_dist, report

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
#: number of spans that a timer keeps for its mean
_KEPT_SPANS = 1000


class Stopwatch(Protocol):
    """Measures spans, one at a time."""

    def start(self) -> None:
        """Begin a span."""

    def stop(self) -> None:
        """End the span."""

    def collect(self, wait: bool) -> list[float]:
        """Return the milliseconds of the spans that ended since the last call, in order.

        Args:
            wait: wait for the device to complete all spans; if False, incomplete spans are left for the next call.
        """


class HostStopwatch:
    """Reads the host's clock.

    Args:
        synchronizes: wait for the device at both ends. Otherwise only the time to launch work on an asynchronous device
            is measured.
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
    """Return a stopwatch for the current accelerator.

    Args:
        synchronized: measure the device's time; False reads the host's clock and never waits.
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


class NamedTimer:
    """A named timer of a `SynchronizedWallClockTimer`. It adds the spans between `start` and `stop`."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._stopwatch = create_stopwatch()
        self._elapsed_ms = 0.0
        self._spans_ms: deque[float] = deque(maxlen=_KEPT_SPANS)

    def start(self) -> None:
        """Begin a span.

        Raises:
            StateError: a span is running.
        """
        if self.started_:
            raise StateError(f"timer {self.name_!r} has already been started; stop it first")
        self._stopwatch.start()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the span and add it.

        Args:
            reset: discard the spans before this one.
            record: accepted for old scripts, and ignored: every span counts for `mean`.

        Raises:
            StateError: no span is running.
        """
        if not self.started_:
            raise StateError(f"timer {self.name_!r} is not started; start it first")
        if reset:
            self.reset()
        self._stopwatch.stop()
        self.started_ = False
        self._add(wait=False)

    def reset(self) -> None:
        """Discard all completed spans. A running span continues."""
        self._stopwatch.collect(wait=True)
        self._elapsed_ms = 0.0
        self._spans_ms.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds of all spans, including a running span up to now. Waits for the device.

        Args:
            reset: discard the spans afterwards.
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
        """Return the mean span in milliseconds since the last reset, without the shortest and longest 10% of spans."""
        self._add(wait=True)
        return trim_mean(list(self._spans_ms), 0.1)

    def _add(self, wait: bool) -> None:
        spans_ms = self._stopwatch.collect(wait)
        self._elapsed_ms += sum(spans_ms)
        self._spans_ms.extend(spans_ms)


class SynchronizedWallClockTimer:
    """Named timers. Each is created on first use: `timers("fwd").start()`."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        if name not in self.timers:
            self.timers[name] = NamedTimer(name)
        return self.timers[name]

    def has_timer(self, name: str) -> bool:
        """Return whether the timer `name` exists."""
        return name in self.timers

    def get_timers(self) -> dict[str, NamedTimer]:
        """Return all timers by name."""
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of the timers `names` in one line. Names without a timer are omitted.

        Args:
            normalizer: divisor of each time, for example a number of steps.
            reset: reset the timers afterwards.
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
        """Return the mean span of each timer in milliseconds, divided by `normalizer`."""
        _check_normalizer(normalizer)
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    @staticmethod
    def memory_usage() -> str:
        """Return the device's memory usage in one line, in GiB."""
        accelerator = get_accelerator()
        return (
            f"mem allocated: {accelerator.memory_allocated() / _GIB:.4f} GiB, "
            f"peak: {accelerator.max_memory_allocated() / _GIB:.4f} GiB"
        )


class NoopTimer:
    """A replacement for disabled timers, with the same methods and no effect."""

    class Timer:
        """A disabled timer."""

        def start(self) -> None:
            """Do nothing."""

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def elapsed(self, reset: bool = True) -> float:
            """Return 0.0."""
            return 0.0

        def mean(self) -> float:
            """Return 0.0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> "NoopTimer.Timer":
        return self.timer

    def has_timer(self, name: str) -> bool:
        """Return True, so that callers may use any timer."""
        return True

    def get_timers(self) -> dict[str, NamedTimer]:
        """Return an empty dictionary."""
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
        """Return an empty dictionary."""
        return {}


@absent_members("utils.timer:ThroughputTimer")
class ThroughputTimer:
    """Counts samples and the time between `start` and `stop`: forward, backward and step, but not the time between two
    steps (data loading, evaluation).

    `engine.tput_timer` is one. The engine calls `start` before a training forward and `stop` in `engine.step()`. The
    first `start_step` steps, which allocate memory and compile kernels, are not counted.

    Args:
        config: the section `timers.throughput`: `enabled`, `synchronized`. None: both true.
        batch_size: number of samples of one step over all ranks.
        start_step: number of steps that are not counted.
        steps_per_output: `stop` prints a line every `steps_per_output` steps; None: never.
        monitor_memory: add the used memory and swap of the host, in percent, to the line.
        logging_fn: prints the line; default: rank 0's log at level INFO.

    The line has the fields of DeepSpeed's line, so that log parsers work; a GB is 2**30 bytes. The model FLOPs
    utilization is the last field if `ideal_step_s` is set.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.enabled = config is None or config.enabled
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or log_dist
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.started = False
        #: seconds that a step's model FLOPs take at the device's peak; None: unknown, so no MFU is printed
        self.ideal_step_s: float | None = None
        self._synchronized = config is None or config.synchronized
        self._stopwatch: Stopwatch | None = None
        self._total_s = 0.0
        self._total_samples = 0
        self._window_s = 0.0  # since the last line
        self._window_samples = 0

    def update_epoch_count(self) -> None:
        """Begin a new epoch: count micro-steps from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch. Does nothing if one has begun already."""
        if not self.enabled or self.started:
            return
        self.started = True
        if self.global_step_count >= self.start_step:
            if self._stopwatch is None:
                self._stopwatch = create_stopwatch(self._synchronized)
            self._stopwatch.start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch. Does nothing without a `start`.

        Args:
            global_step: the micro-batch was the last of an optimizer step.
            report_speed: print the line if it is due.
        """
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._stopwatch is not None:
            self._stopwatch.stop()
            self._collect(wait=False)
        if not global_step:
            return
        self.global_step_count += 1
        if self._stopwatch is not None:
            self._total_samples += self.batch_size
            self._window_samples += self.batch_size
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            self._report()

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all ranks over all counted steps; -inf before the first. Waits for the
        device."""
        self._collect(wait=True)
        return self._total_samples / self._total_s if self._total_s > 0.0 else float("-inf")

    @property
    def total_elapsed_time(self) -> float:
        """Seconds of all counted steps that the device has completed when last read."""
        return self._total_s

    def _collect(self, wait: bool) -> None:
        if self._stopwatch is not None:
            elapsed_s = sum(self._stopwatch.collect(wait)) / 1e3
            self._total_s += elapsed_s
            self._window_s += elapsed_s

    def _report(self) -> None:
        average = self.avg_samples_per_sec()
        if self._window_s > 0.0:
            line = (
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={average:.6g}, CurrSamplesPerSec={self._window_samples / self._window_s:.6g}"
            )
            accelerator = get_accelerator()
            line += (
                f", MemAllocated={accelerator.memory_allocated() / _GIB:.2f}GB, "
                f"MaxMemAllocated={accelerator.max_memory_allocated() / _GIB:.2f}GB"
            )
            if self.monitor_memory:
                import psutil  # late: few runs need it

                line += f", vm %: {psutil.virtual_memory().percent}, swap %: {psutil.swap_memory().percent}"
            if self.ideal_step_s is not None:
                num_steps = self._window_samples / self.batch_size
                line += f", MFU={self.ideal_step_s * num_steps / self._window_s:.2%}"
            self.logging(line)
        self._window_s, self._window_samples = 0.0, 0


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of `data` without its smallest and largest share `trim_percent`; 0 for no data.

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
