"""Who watches the engine: timers, the printed lines, the monitor. They are told what happened and change nothing."""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm, log
from deepspeed.comm.values import all_gather_values
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.events import tell
from deepspeed.engine.step import StepStats
from deepspeed.monitor.base import is_writer
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.step_events import step_events
from deepspeed.profiling.breakdown import Breakdown, forward_table, step_table
from deepspeed.profiling.throughput import ThroughputTimer

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine


class Observers:
    """Called by the engine at each phase and after each step. Built by `create_observers`.

    Nothing here waits for the device unless a monitor writes on this rank, or a line is due (`steps_per_print`).

    Args:
        monitor: gets the events of each step.
        breakdown: measures the phases.
        tput_timer: measures samples per second.
        steps_per_print: a line every so many steps; infinity: never.
        group: ranks that show their times in one table; None: each has its own to show.
    """

    def __init__(
        self,
        monitor: MonitorMaster,
        breakdown: Breakdown,
        tput_timer: ThroughputTimer,
        *,
        steps_per_print: float,
        group: ProcessGroup | None,
    ) -> None:
        self.monitor = monitor
        self.breakdown = breakdown
        self.tput_timer = tput_timer
        self.phase: Callable[[str], AbstractContextManager[None]] = breakdown.phase
        self._every = steps_per_print
        self._group = group
        self._loss: Tensor | None = None

    def forward(self) -> AbstractContextManager[None]:
        """A context around a forward; one without gradients is not a part of any step."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        self.tput_timer.start()
        return self.phase("forward")

    def saw_loss(self, loss: Tensor) -> None:
        """A backward of `loss` (divided by the accumulation steps) is done. The value stays on the device."""
        if self.monitor.is_writing:
            loss = loss.detach().float()
            self._loss = loss if self._loss is None else self._loss + loss

    def micro_batch_ended(self) -> None:
        """A micro-batch that does not complete a step."""
        self.tput_timer.stop()

    def step_ended(self, engine: "DeepSpeedEngine", stats: StepStats) -> None:
        """An optimizer step is over and counted."""
        tell("ds_step_end", stats=stats)
        self.tput_timer.batch_size = engine.train_batch_size()
        is_due = engine.global_steps % self._every == 0
        if is_due and is_writer() and log.logger.isEnabledFor(logging.WARNING):  # else nobody would see it
            log.announce(f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
                         f"mom={engine.get_mom()}")  # fmt: skip
            self.tput_timer.stop(global_step=True)
        else:
            self.tput_timer.stop(global_step=True, report_speed=False)
        if self.breakdown.enabled:
            self.breakdown.end_step()
        if self.monitor.is_writing:
            self._write(engine, stats)
        self._loss = None
        if is_due and self.breakdown.enabled:
            self._print_table()

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Print a forward of `fwd_time` milliseconds and its parts: timers of `engine.timers` called `fwd_...`."""
        timers = self.breakdown.timers.get_timers()
        parts = {name: timer.elapsed() for name, timer in timers.items() if name.startswith("fwd_")}
        log.report(f"time of a forward\n{forward_table(fwd_time, parts)}")

    def close(self) -> None:
        """End the monitors."""
        self.monitor.close()

    def _write(self, engine: "DeepSpeedEngine", stats: StepStats) -> None:
        scales = engine.fp16_enabled() or engine.precision.loss_scaler.is_dynamic
        rates = engine.get_lr()
        events = step_events(
            engine.global_samples,
            loss=self._loss.item() if self._loss is not None else None,
            lr=rates[0] if rates else None,
            loss_scale=stats.loss_scale if scales else None,
            times_ms=self.breakdown.take_times(),
        )
        self.monitor.write_events(events)

    def _print_table(self) -> None:
        window = self.breakdown.take_window()
        by_rank = [window.times_ms]
        if self._group is not None:
            by_rank = all_gather_values(window.times_ms, self._group)
        if is_writer():
            log.report(f"time and memory by phase\n{step_table(window, by_rank)}")


def create_observers(config: DeepSpeedConfig, group: ProcessGroup | None) -> Observers:
    """The observers that `config` asks for; `group` is the data-parallel group. Called by `build.py`, on every rank."""
    return Observers(
        MonitorMaster(config.monitor_config),
        Breakdown(times=config.wall_clock_breakdown, memory=config.memory_breakdown),
        # the engine says when a line is due, so that it is due with the others after a checkpoint was loaded too
        ThroughputTimer(
            config.timers.throughput, int(config.train_batch_size), steps_per_output=1, logging_fn=log.announce
        ),
        steps_per_print=config.steps_per_print,
        group=_ranks_of_table(config, group),
    )


def _ranks_of_table(config: DeepSpeedConfig, group: ProcessGroup | None) -> ProcessGroup | None:
    """The group whose ranks all print the table at the same steps. A rank with a configuration of its own (people
    silence ranks that way) would leave the others waiting for its times."""
    group = comm.get_world_group() if group is None else group
    if comm.get_world_size(group) == 1:
        return None
    mine = [config.wall_clock_breakdown, float(config.steps_per_print)]
    found = all_gather_values(mine, group)
    return group if config.wall_clock_breakdown and all(theirs == mine for theirs in found) else None
