"""`watch.slow_rank_window`: which ranks are slower than their peers.

Ranks of a step end it together, since they wait for one another in it. So what tells them apart is a rank's own time:
that of the step, and of what the script does before it, without waits for others (`comm/record.py`). Called by the
observers after each step.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from deepspeed import log
from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.record import waits
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.config.monitor import WatchConfig
from deepspeed.parallel.mesh import Mesh
from deepspeed.profiling.timer import create_stopwatch


class SlowRanks:
    """Made by all ranks of the mesh together, before the backends of its groups are.

    Args:
        window: steps whose mean is compared.
        factor: how many times the median a slow rank's time exceeds.
    """

    def __init__(self, mesh: Mesh, *, window: int, factor: float) -> None:
        self._mesh, self._window, self._factor = mesh, window, factor
        self._ranks = mesh.ranks(*mesh.layout.axes)
        self._stopwatch = create_stopwatch()
        self._num_steps: int | None = None  # of the window; None: it has not begun
        self._waited_ms = 0.0  # before it
        waits.watch(self)
        group_backend(mesh.norm_group).connect()

    def step_ended(self, step: int) -> None:
        """A step is over. A collective of all ranks of the mesh at the end of a window.

        The first step, in which memory is claimed and kernels are made, is in no window.

        Args:
            step: how many there were.
        """
        if self._num_steps is None:
            self._begin()
            return
        self._num_steps += 1
        waits.total_ms(wait=False)  # so that what a device measures does not pile up
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
        """The engine is destroyed."""
        waits.unwatch(self)


def create_slow_ranks(config: WatchConfig, mesh: Mesh) -> SlowRanks | None:
    """Create what names slow ranks, before the backends of groups, whose waits it counts; None: it is not asked for."""
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
