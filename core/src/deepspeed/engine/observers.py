"""`Observers`: timers, printed lines and monitors watch the engine. They receive values and change nothing.

`notify` calls the event hooks of plugins. `Progress` counts the steps so far and `StepStats` describes one step;
`training.py` fills both. `create_observers` and `create_profile` create what the configuration asks for.

`SlowRanks` finds ranks that are slower than their peers (`watch.slow_rank_window`). All ranks end a step together, as
they wait for one another in it. So a rank is judged by its own time: the time of the step, and of the script's work
before the step, without waits for others (`comm/record.py`).

`DeviceFaults` finds new faults of this rank's device (`watch.device_faults_every`). A failing device seldom raises at
once: for hours before, memory errors are corrected, and clocks go down. Plugins count such faults (hook
`ds_device_faults`); each rank warns of its own device, and waits for no other rank.
"""

import contextlib
import logging
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm, log
from deepspeed.comm.record import waits
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.config.monitor import FlopsProfilerConfig, MonitorConfig, ThroughputTimerConfig, WatchConfig
from deepspeed.config.training import AutotuningConfig
from deepspeed.engine.device import local_rank
from deepspeed.log import warn_once
from deepspeed.monitor.monitor import MonitorMaster, is_writer, step_events
from deepspeed.parallel.mesh import Mesh
from deepspeed.plugins.manager import plugin_manager
from deepspeed.precision.policy import warn_unless_finite
from deepspeed.profiling.breakdown import Breakdown, forward_table, step_table
from deepspeed.profiling.timer import ThroughputTimer, create_stopwatch

if TYPE_CHECKING:
    from deepspeed.autotuning.trial import TrialProfile
    from deepspeed.profiling.step_profile import StepProfile

_STEPS_PER_TABLE = 10  # of `wall_clock_breakdown` and `memory_breakdown`, if `steps_per_print` is not set
_MEASURES_NOTHING = (
    "autotuning.enabled: found true without metric_path, so nothing is measured and training goes on; search by "
    "`deepspeed --autotuning tune`"
)

_NOBODY_COUNTS = (
    "watch.device_faults_every: found {every}, but no plugin of this process counts the faults of {device} (hook "
    "ds_device_faults; ds_report lists the plugins), so nothing is watched; set it to 0, or install an extension that "
    "counts them"
)


@dataclass(slots=True)
class Progress:
    """The engine's counters."""

    global_steps: int = 0  # optimizer steps, skipped ones included
    global_samples: int = 0  # over all ranks
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """`StepStats` holds what observers learn of one step."""

    global_step: int  # steps taken before this one
    applied: bool  # False: the gradients overflowed and the step was skipped
    norm: float | Tensor  # `grad_norm`; not read yet if it is a 0-D tensor on the device
    loss_scale: float  # the scale that this step's losses had

    @property
    def grad_norm(self) -> float:
        """Return the global L2 norm of the unscaled gradients, before clipping. The host waits for the device here."""
        return float(self.norm)


class Observers:
    """The engine calls `Observers` at each phase and after each step. `build.py` creates it.

    Nothing here waits for the device unless a monitor writes on this rank, or a line is due (`steps_per_print`).

    Args:
        monitor: gets the events of each step.
        breakdown: measures the phases.
        tput_timer: measures samples per second.
        steps_per_print: a line every so many steps; infinity: never.
        shows_loss_scale: whether the loss scale is one of the events.
        group: ranks whose times are in one table; None: each rank shows its own.
        slow_ranks: names ranks that are slower than others; None: not asked for.
        profile: counts the operations of one step, or measures a trial of a search; None: not asked for.
    """

    def __init__(
        self,
        monitor: MonitorMaster,
        breakdown: Breakdown,
        tput_timer: ThroughputTimer,
        *,
        steps_per_print: float,
        shows_loss_scale: bool,
        group: ProcessGroup | None,
        slow_ranks: "SlowRanks | None" = None,
        profile: "StepProfile | TrialProfile | None" = None,
    ) -> None:
        self.monitor = monitor
        self.breakdown = breakdown
        breakdown.show_names()
        self.tput_timer = tput_timer
        self.profile = profile
        self._plugins = plugin_manager()
        self._every = steps_per_print
        self._prints = steps_per_print < math.inf
        self._shows_loss_scale = shows_loss_scale
        self._group = group
        self._slow_ranks = slow_ranks
        self._loss: Tensor | None = None
        #: called at the end of each step, by all ranks; a function that raises SystemExit ends the process there
        self.after_step: list[Callable[[StepStats], None]] = []

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context around a forward; a forward without gradients is not part of any step."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        self.tput_timer.start()
        return self.phase("forward")

    @property
    def phase(self) -> Callable[[str], AbstractContextManager[Any]]:
        """Return the function that takes the name of a phase and returns a context around it."""
        return self.breakdown.phase if self.profile is None else self._profiled_phase

    @contextlib.contextmanager
    def _profiled_phase(self, name: str) -> Iterator[None]:
        assert self.profile is not None
        with self.profile.phase(name), self.breakdown.phase(name):
            yield

    def saw_loss(self, loss: Tensor) -> None:
        """Record the loss of a finished backward (divided by the accumulation steps). The value stays on the device."""
        if self.monitor.monitors or self._prints:
            loss = loss.detach().float()
            self._loss = loss if self._loss is None else self._loss + loss

    def step_began_again(self) -> None:
        """Drop the losses of the backwards so far: a failure has cost their gradients."""
        self._loss = None

    def micro_batch_ended(self) -> None:
        """Stop the timer after a call of `engine.step()`; after `step_ended` nothing is left to measure."""
        self.tput_timer.stop()

    def step_ended(
        self, stats: StepStats, progress: Progress, *, batch_size: int, lr: list[float], momentum: list[Any]
    ) -> None:
        """Report an optimizer step that is over and counted.

        Args:
            progress: with this step counted.
            batch_size: samples of the step, over all ranks.
            lr, momentum: of each parameter group, for the next step.
        """
        if self._plugins.active.hook.ds_step_end.get_hookimpls():  # most often no plugin has this hook
            self._plugins.notify("ds_step_end", stats=stats)
        self.tput_timer.batch_size = batch_size
        is_due = progress.global_steps % self._every == 0
        is_shown = is_due and is_writer() and log.shows_asked_for()  # else nobody would see it
        if is_shown:
            if stats.applied:
                warn_unless_finite(stats.grad_norm)
            loss = "" if self._loss is None else f", loss={self._loss.item():.4g}"
            log.announce(
                f"step={progress.global_steps}, skipped={progress.skipped_steps}, lr={lr}, mom={momentum}{loss}",
                is_asked_for=True,
            )
        self.tput_timer.stop(global_step=True, report_speed=is_shown)
        if self.breakdown.counts_steps:
            self.breakdown.end_step()
        if self.monitor.monitors:
            self._write(stats, progress.global_samples, lr)
        self._loss = None
        if is_due and self.breakdown.enabled:
            self._print_table()
        if self._slow_ranks is not None:
            self._slow_ranks.step_ended(progress.global_steps)
        if self.profile is not None:
            self.profile.step_ended(batch_size)  # the last step of a trial ends the process
            self.tput_timer.ideal_step_s = self.profile.ideal_step_s
        for saw_step in self.after_step:
            saw_step(stats)

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Print a forward of `fwd_time` milliseconds and its parts: timers of `engine.timers` called `fwd_...`."""
        timers = self.breakdown.timers.get_timers()
        parts = {name: timer.elapsed() for name, timer in timers.items() if name.startswith("fwd_")}
        log.report(f"time of a forward\n{forward_table(fwd_time, parts)}")

    def close(self) -> None:
        """End the monitors and the watch of slow ranks."""
        if self._slow_ranks is not None:
            self._slow_ranks.close()
        self.monitor.close()

    def _write(self, stats: StepStats, samples: int, lr: list[float]) -> None:
        events = step_events(
            samples,
            loss=self._loss.item() if self._loss is not None else None,
            lr=lr[0] if lr else None,
            loss_scale=stats.loss_scale if self._shows_loss_scale else None,
            times_ms=self.breakdown.take_times(),
        )
        self.monitor.write_events(events)

    def _print_table(self) -> None:
        window = self.breakdown.take_window()
        by_rank = [window.times_ms]
        if self._group is not None:
            by_rank = all_gather_values(window.times_ms, backend=group_backend(self._group))
        if is_writer():
            log.report(f"time and memory by phase\n{step_table(window, by_rank)}")


def ranks_of_table(*, is_enabled: bool, steps_per_print: float, group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group whose ranks all print the table at the same steps; a collective over `group` (data-parallel).

    A rank with a configuration of its own (people silence ranks that way) would leave the others waiting for its times.

    Args:
        is_enabled: whether this rank prints the table (`wall_clock_breakdown`).
    """
    group = comm.get_world_group() if group is None else group
    if comm.get_world_size(group) == 1:
        return None
    mine = [is_enabled, float(steps_per_print)]
    found = all_gather_values(mine, group)
    return group if is_enabled and all(theirs == mine for theirs in found) else None


def create_observers(
    monitor: MonitorConfig,
    throughput: ThroughputTimerConfig,
    group: ProcessGroup | None,
    slow_ranks: "SlowRanks | None",
    profile: "StepProfile | TrialProfile | None",
    *,
    times: bool,
    memory: bool,
    steps_per_print: float | None,
    train_batch_size: int,
    shows_loss_scale: bool,
) -> Observers:
    """Create the observers. A collective over `group`, whose ranks print their tables together.

    Args:
        group, slow_ranks, profile, shows_loss_scale: as for `Observers`.
        times, memory: what a table shows (`wall_clock_breakdown`, `memory_breakdown`).
        steps_per_print: a line every so many steps; None: the configuration does not set it.
        train_batch_size: samples per step, over all ranks.
    """
    every = steps_per_print
    if every is None:
        every = _STEPS_PER_TABLE if times or memory else math.inf
    return Observers(
        MonitorMaster(monitor),
        Breakdown(times=times, memory=memory),
        # the observers decide when a line is due, so that all lines come together after a checkpoint was loaded too
        ThroughputTimer(
            throughput, train_batch_size, steps_per_output=1, logging_fn=partial(log.announce, is_asked_for=True)
        ),
        steps_per_print=every,
        shows_loss_scale=shows_loss_scale,
        group=ranks_of_table(is_enabled=times, steps_per_print=every, group=group),
        slow_ranks=slow_ranks,
        profile=profile,
    )


def create_profile(
    trial: AutotuningConfig,
    flops: FlopsProfilerConfig,
    module: torch.nn.Module,
    mesh: Mesh,
    progress: Progress,
    *,
    micro_batch_size: int,
    num_micro_batches: int,
) -> "StepProfile | TrialProfile | None":
    """Create the measurement of a trial (`autotuning`), on every rank, or of one step (`flops_profiler`), on rank 0
    alone; return None if neither is asked for."""
    if trial.measures:
        from deepspeed.autotuning.trial import TrialProfile  # late: few runs ask for it

        return TrialProfile(trial, module, {"micro_batch": micro_batch_size}, is_whole=mesh.model_size == 1)
    if trial.enabled:
        warn_once(_MEASURES_NOTHING)
    if not (flops.enabled and is_writer()):
        return None
    from deepspeed.profiling.flops import FlopsProfiler  # late: few runs ask for it
    from deepspeed.profiling.step_profile import StepProfile

    facts = {
        "ranks": str(len(mesh.layout.ranks)),
        "data-parallel ranks": str(mesh.size("dp")),
        "ranks of one model": f"{mesh.model_size} ({mesh.size('pp')} stages x {mesh.size('tp')} tensor-parallel)",
        "micro-batch of a rank": str(micro_batch_size),
        "micro-batches": str(num_micro_batches),
    }
    return StepProfile(FlopsProfiler(module), flops, lambda: progress.global_steps, facts)


class SlowRanks:
    """`SlowRanks` names slow ranks. All ranks of the mesh create it together, before the backends of its groups.

    Args:
        window: number of steps over which times are averaged.
        factor: a rank is slow if its time exceeds the median by more than this factor.
    """

    def __init__(self, mesh: Mesh, *, window: int, factor: float) -> None:
        self._mesh, self._window, self._factor = mesh, window, factor
        self._ranks = mesh.ranks(*mesh.layout.axes)
        self._stopwatch = create_stopwatch()
        self._num_steps: int | None = None  # of the window; None: it has not begun
        self._waited_ms = 0.0  # before the window
        waits.watch(self)
        group_backend(mesh.norm_group).connect()

    def step_ended(self, step: int) -> None:
        """Count a step. At the end of a window this is a collective of all ranks of the mesh.

        The first step, in which memory is allocated and kernels are built, is in no window.

        Args:
            step: number of steps so far.
        """
        if self._num_steps is None:
            self._begin()
            return
        self._num_steps += 1
        waits.total_ms(wait=False)  # collects finished measurements, so that they do not pile up
        if self._num_steps < self._window:
            return
        self._stopwatch.stop()
        total_ms = sum(self._stopwatch.collect(wait=True))
        own_ms = max(0.0, total_ms - (waits.total_ms(wait=True) - self._waited_ms)) / self._window
        by_rank = all_gather_values(
            [own_ms, self._mesh.rank("pp")], backend=group_backend(self._mesh.norm_group), call="times of ranks"
        )
        times = [Time(rank, *theirs) for rank, theirs in zip(self._ranks, by_rank, strict=True)]
        for text in told(times, self._factor):
            steps = f"steps {step - self._window + 1} to {step}"
            log.log_dist(f"watch.slow_rank_window: {steps}: {text}", self._ranks[:1], logging.WARNING)
        self._begin()

    def _begin(self) -> None:
        self._waited_ms = waits.total_ms(wait=True)
        self._num_steps = 0
        self._stopwatch.start()

    def close(self) -> None:
        """Stop watching waits; the engine is destroyed."""
        waits.unwatch(self)


def create_slow_ranks(config: WatchConfig, mesh: Mesh) -> SlowRanks | None:
    """Create the watch of slow ranks, before the group backends, whose waits it counts; None: it is not needed."""
    if config.slow_rank_window == 0 or len(mesh.layout.ranks) == 1:
        return None
    return SlowRanks(mesh, window=config.slow_rank_window, factor=config.slow_rank_factor)


@dataclass(frozen=True)
class Time:
    """A rank's own milliseconds per step, and the pipeline stage whose ranks do the same."""

    rank: int
    own_ms: float
    stage: int = 0


def told(times: Sequence[Time], factor: float) -> list[str]:
    """Return a sentence for each pipeline stage with ranks that are slower than its median by more than `factor`.

    The sentence names these ranks, the slowest first. The median of an even number of ranks is the lower one, so that
    one of two may be slow.
    """
    found = []
    for stage in sorted({each.stage for each in times}):
        peers = [each for each in times if each.stage == stage]
        median_ms = median_low(each.own_ms for each in peers)
        slow = sorted((each for each in peers if each.own_ms > factor * median_ms), key=lambda each: -each.own_ms)
        if slow and median_ms > 0:
            figures = ", ".join(f"{each.own_ms:.1f} ms, {each.own_ms / median_ms:.2f} times as long" for each in slow)
            found.append(
                f"{named_ranks([each.rank for each in slow])} took longer than the median of {len(peers)} ranks, which "
                f"is {median_ms:.1f} ms per step without waits for others: {figures}. The others wait for "
                f"{'it' if len(slow) == 1 else 'them'} in every step; look at the host's other processes, its clock "
                "and temperature, its disk, and at samples that are longer than those of other ranks"
            )
    return found


class DeviceFaults:
    """`DeviceFaults` remembers the counts of one device, and warns of those that have risen.

    Args:
        device: of this rank.
        every: number of steps between two reads.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self._device, self._every = device, every
        self._num_steps = 0  # since they were last read
        self._last: dict[tuple[str, str], int] = {}
        self._read()

    def step_ended(self, _: StepStats) -> None:
        """Count a step; read the counts if it is time."""
        self._num_steps += 1
        if self._num_steps == self._every:
            self._num_steps = 0
            self._read()

    def _read(self) -> None:
        """Read the counts, and warn of new faults. The first read of a count finds no new faults."""
        found, reasons = plugin_manager().device_faults(self._device.index)
        for reason in reasons:
            warn_once(reason, (-1,))
        new = {key: count - self._last.get(key, count) for key, count in found.items()}
        risen = [f"{more} more {key[1]} ({found[key]} in all)" for key, more in new.items() if more > 0]
        if risen:
            log.logger.warning(
                f"watch.device_faults_every: since they were last read, {_name(self._device)} of {platform.node()} had "
                f"{', '.join(risen)}. Look at the log of the machine's kernel; if they go on, train without it "
                "(launcher: --exclude)"
            )
        self._last |= found


def create_device_faults(config: WatchConfig, device: torch.device) -> DeviceFaults | None:
    """Create the watch of this rank's device; None: it is not asked for, no plugin counts faults, or the first rank of
    this host watches the device for all ranks."""
    every = config.device_faults_every
    if every == 0 or (device.index is None and local_rank(None) != 0):
        return None
    if not plugin_manager().providers("ds_device_faults"):
        warn_once(_NOBODY_COUNTS.format(every=every, device=_name(device)))
        return None
    return DeviceFaults(device, every)


def _name(device: torch.device) -> str:
    return "the host" if device.index is None else str(device)
