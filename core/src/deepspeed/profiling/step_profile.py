"""`StepProfile` profiles one step of an engine and prints it, as the section `flops_profiler` asks.

`engine/observers.py` tells it of each phase. Built, and imported, only where the configuration asks for it.
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

#: of the matrices of a product that shows a device's peak; a host takes seconds for larger ones
_PEAK_SIZE, _HOST_PEAK_SIZE, _PEAK_RUNS = 8192, 1024, 5


class StepProfile:
    """Measures the phases of one step.

    Forwards are profiled by module; of a backward all operations are counted, those of forwards that it repeats too.
    `peak_tflops` adds the model FLOPs utilization: the FLOPs that the model asks for, in the time that a step takes, as
    a share of the peak (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B). Of a backward at most twice the FLOPs
    of the forwards count, since more of them are repeated forwards.

    Args:
        profiler: profiles the engine's model.
        config: which step, and what is printed.
        num_steps: returns the steps so far.
        facts: what the summary says of the run, first: name -> value.
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
        #: how long the model FLOPs of that step take at the peak; None: it was not profiled yet, or no peak is known
        self.ideal_step_s: float | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase, if it is one of the step. A step that fails is measured again from its beginning."""
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
        """A step is over; print it if it was the one. A file that cannot be written is a warning.

        Args:
            batch_size: samples of the step, over all ranks.
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
        except OSError as error:  # the other ranks go on training, and wait for this one
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
        """Compute the model FLOPs utilization of the step, and keep what that of later ones is computed from."""
        asked = self._config.peak_tflops
        if asked is None or self._backward_flops == 0:  # of a plain `loss.backward()`, which is not seen
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
    """Return the FLOPS of the fastest of some products of square matrices, of the device and type of the weights."""
    weight = next((param for param in model.parameters() if param.is_floating_point()), torch.empty(0))
    size = _HOST_PEAK_SIZE if weight.device.type == "cpu" else _PEAK_SIZE
    matrix = torch.full((size, size), 1.0 / size, dtype=weight.dtype, device=weight.device)
    stopwatch = create_stopwatch(True)
    times_ms = []
    for _ in range(1 + _PEAK_RUNS):  # memory is claimed in the first
        stopwatch.start()
        matrix @ matrix
        stopwatch.stop()
        times_ms += stopwatch.collect(True)
    return 2 * size**3 / (min(times_ms) / 1e3)
