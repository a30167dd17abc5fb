"""`ThroughputTimer`: samples per second, over the whole run and since the last line."""

from collections.abc import Callable
from typing import Any

from deepspeed._absent_members import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.log import log_dist
from deepspeed.profiling.clock import Stopwatch, create_stopwatch

_GIB = 2**30


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
            self.logging(line)
        self._window_s, self._window_samples = 0.0, 0
