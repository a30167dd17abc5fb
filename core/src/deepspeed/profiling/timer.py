"""`SynchronizedWallClockTimer` and `ThroughputTimer`, as documented at `deepspeed.utils.timer`.

    timers = SynchronizedWallClockTimer()
    timers("data").start()
    ...
    timers("data").stop()
    timers.log(["data"])                    # time (ms) | data: 12.34

Nothing waits for the device before a time is read, where the device has events: a `Stopwatch` reads the host's clock,
or records a device's own events. The engine's own timers are `engine.timers`, by the names below; `breakdown.py` prints
them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepspeed._absent_members import absent_members
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
#: spans that a timer keeps for its mean
_KEPT_SPANS = 1000


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
    """A `NoopTimer` replaces timers that are off: everything can be called and nothing happens."""

    class Timer:
        """A `Timer` is one of the timers that are off."""

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


@absent_members("utils.timer:ThroughputTimer")
class ThroughputTimer:
    """Counts samples, and the time between `start` and `stop`: forward, backward and step, but not what is between two
    steps (loading data, evaluating).

    The engine calls `start` before a training forward and `stop` in `engine.step()`; it is `engine.tput_timer`. The
    first `start_step` steps, in which memory is claimed and kernels are made, are not counted.

    Args:
        config: the section `timers.throughput`: `enabled`, `synchronized`. None: both true.
        batch_size: samples of one step over all ranks.
        start_step: steps that are not counted.
        steps_per_output: `stop` prints a line every so many steps; None: never.
        monitor_memory: add the host's memory and swap in use, in percent, to that line.
        logging_fn: what prints; default: rank 0's log at level INFO.

    The line has the fields that DeepSpeed's has, so that programs which parse logs find them; its GB are 2**30 bytes.
    Last comes the model FLOPs utilization, where `ideal_step_s` was set.
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
        #: how long the device would take for a step's model FLOPs at its peak; None: not known, so no MFU is printed
        self.ideal_step_s: float | None = None
        self._synchronized = config is None or config.synchronized
        self._stopwatch: Stopwatch | None = None
        self._total_s = 0.0
        self._total_samples = 0
        self._window_s = 0.0  # since the last line
        self._window_samples = 0

    def update_epoch_count(self) -> None:
        """A new epoch begins: micro-steps are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A forward begins. Nothing if one has begun already."""
        if not self.enabled or self.started:
            return
        self.started = True
        if self.global_step_count >= self.start_step:
            if self._stopwatch is None:
                self._stopwatch = create_stopwatch(self._synchronized)
            self._stopwatch.start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch is done. Nothing without a `start`.

        Args:
            global_step: it was the last of an optimizer step.
            report_speed: print the line if it is time.
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
        """Samples per second over all counted steps, all ranks together; -inf before there is one. Waits for the
        device."""
        self._collect(wait=True)
        return self._total_samples / self._total_s if self._total_s > 0.0 else float("-inf")

    @property
    def total_elapsed_time(self) -> float:
        """Seconds of all counted steps, as far as the device's answers are there."""
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
                import psutil  # late: few runs ask for it

                line += f", vm %: {psutil.virtual_memory().percent}, swap %: {psutil.swap_memory().percent}"
            if self.ideal_step_s is not None:
                num_steps = self._window_samples / self.batch_size
                line += f", MFU={self.ideal_step_s * num_steps / self._window_s:.2%}"
            self.logging(line)
        self._window_s, self._window_samples = 0.0, 0


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
