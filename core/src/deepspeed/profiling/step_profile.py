"""`StepProfile` profiles one step of an engine and prints the result, as configured by the section `flops_profiler`.

`engine/observers.py` reports each phase to it. It is imported and built only if the configuration enables it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from deepspeed.config.monitor import FlopsProfilerConfig
from deepspeed.log import log_dist
from deepspeed.profiling.breakdown import Breakdown, duration_to_string, flops_to_string, number_to_string, rate
from deepspeed.profiling.flops import FlopsProfiler, create_counter, get_module_flops, write
from deepspeed.profiling.timer import create_stopwatch

#: matrix sizes to measure the peak of a device and of the host, which takes seconds for larger ones; number of runs
_PEAK_SIZE, _HOST_PEAK_SIZE, _PEAK_RUNS = 8192, 1024, 5


class StepProfile:
    """Measures the phases of one step.

    Forwards are profiled by module. For a backward, all operations are counted, including recomputed forwards.
    `peak_tflops` adds the model FLOPs utilization: the model's FLOPs per second of the step as a share of the peak
    (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B). A backward counts at most twice the FLOPs of the forwards,
    because the rest are recomputed forwards.

    Args:
        profiler: profiles the engine's model.
        config: the step to profile, and the output options.
        num_steps: returns the number of steps so far.
        facts: name -> value of facts about the run, printed first in the summary.
    """

    def __init__(
        self, profiler: FlopsProfiler, config: FlopsProfilerConfig, num_steps: Callable[[], int], facts: dict[str, str]
    ) -> None:
        self.profiler = profiler
        self._config = config
        self._num_steps = num_steps
        self._facts = facts
        self._breakdown = Breakdown(times=True, memory=False)
        self._backward_flops = 0
        #: seconds that the model FLOPs of a step take at the peak; None: not profiled yet, or the peak is unknown
        self.ideal_step_s: float | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase of the step to profile. If the step fails, the measurement starts over."""
        if self._num_steps() != self._config.profile_step:
            yield
            return
        if not self.profiler.started:
            self.profiler.start_profile()
            self.profiler.is_paused = True
        try:
            with self._breakdown.phase(name), self._counted(name):
                yield
        except BaseException:
            self._forget()
            raise

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        if name == "forward":
            before, self.profiler.is_paused = self.profiler.is_paused, False
            try:
                yield
            finally:
                self.profiler.is_paused = before
        elif name == "backward_inner":
            with create_counter() as counter:
                yield
            self._backward_flops += counter.get_total_flops()
        else:
            yield

    def step_ended(self, batch_size: int) -> None:
        """Print the profile if this was the step to profile. A file that cannot be written only causes a warning.

        Args:
            batch_size: number of samples of the step over all ranks.
        """
        if not self.profiler.started:
            return
        self.profiler.stop_profile()
        config = self._config
        report = self.profiler.report(
            config.profile_step,
            config.module_depth,
            config.top_modules,
            config.detailed,
            self._facts,
            self._phases(batch_size),
        )
        self._forget()
        try:
            write(report, config.output_file)
        except OSError as error:  # do not raise: the other ranks continue and would wait for this rank
            log_dist(f"flops_profiler.output_file: {error}; the profile is lost", level=logging.WARNING)

    def _phases(self, batch_size: int) -> dict[str, str]:
        times_ms = self._breakdown.take_times()
        forward, backward, update = (times_ms.get(name, 0.0) / 1e3 for name in ("forward", "backward", "step"))
        forward_flops = get_module_flops(self.profiler.model)
        whole_s = forward + backward + update
        facts = self._utilization(forward_flops, whole_s)
        return {
            "backward FLOPs": number_to_string(self._backward_flops).rstrip(),
            "backward latency": duration_to_string(backward),
            "backward FLOPS": rate(self._backward_flops, backward),
            "forward and backward FLOPS": rate(forward_flops + self._backward_flops, forward + backward),
            "update latency": duration_to_string(update),
            "step latency": duration_to_string(whole_s),
            "samples per second": f"{batch_size / whole_s:.2f}" if whole_s > 0 else "-",
            **facts,
        }

    def _utilization(self, forward_flops: int, whole_s: float) -> dict[str, str]:
        """Compute the model FLOPs utilization of the step, and set `ideal_step_s` for later steps."""
        asked = self._config.peak_tflops
        if asked is None or self._backward_flops == 0:  # 0 after a plain `loss.backward()`, which is not observed
            return {}
        peak = measured_peak(self.profiler.model) if isinstance(asked, str) else asked * 1e12
        model_flops = forward_flops + min(self._backward_flops, 2 * forward_flops)
        self.ideal_step_s = model_flops / peak
        return {
            "peak FLOPS of a device": flops_to_string(peak),
            "model FLOPs utilization": f"{self.ideal_step_s / whole_s:.2%}" if whole_s > 0 else "-",
        }

    def _forget(self) -> None:
        self.profiler.end_profile()
        self._breakdown = Breakdown(times=True, memory=False)
        self._backward_flops = 0


def measured_peak(model: torch.nn.Module) -> float:
    """Measure products of square matrices with the weights' device and dtype, and return the FLOPS of the fastest."""
    weight = next((param for param in model.parameters() if param.is_floating_point()), torch.empty(0))
    size = _HOST_PEAK_SIZE if weight.device.type == "cpu" else _PEAK_SIZE
    matrix = torch.full((size, size), 1.0 / size, dtype=weight.dtype, device=weight.device)
    stopwatch = create_stopwatch(True)
    times_ms = []
    for _ in range(1 + _PEAK_RUNS):  # the first run allocates memory
        stopwatch.start()
        matrix @ matrix
        stopwatch.stop()
        times_ms += stopwatch.collect(True)
    return 2 * size**3 / (min(times_ms) / 1e3)
