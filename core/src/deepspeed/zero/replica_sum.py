"""`ReplicaSum`: gradients of a step summed over the copies of the weights: those of MiCS, and parameters of several
pipeline stages. Called by `strategy.py`.

A bucket is reduce-scattered in the shard group after every backward. The shards are summed over the replicas once per
step, which moves the fewest bytes between shard groups (the two hops of MiCS, arXiv 2205.00119).

[Note: a second sum in a step] After the sum every replica holds all of it. If more is added before the step, one
replica must contribute it, and the others only what is new: so these forget it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.zero.flat_group import FlatGroup


class ReplicaSum:
    """Args:
    wire_dtype: dtype of the reduction; None means the gradients' own.
    """

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self._wire_dtype = wire_dtype
        self._is_done = False
        self._in_flight: list[tuple[GroupBackend, Work]] = []

    def add_up(self, units: Iterable[tuple[FlatGroup, Tensor]]) -> None:
        """Sum the reduced shards [S] of `units` over the replicas of each, in place. A collective; once per step."""
        if self._is_done:
            return
        for group, gradients_S in units:
            replicas = group.ranks.replicas
            if replicas is None:
                continue
            wire_S = gradients_S.to(group.device, self._wire_dtype or gradients_S.dtype)
            self._in_flight.append((replicas, replicas.all_reduce(wire_S, tag=wire_S.numel())))
            if wire_S is not gradients_S:  # a copy; the next one reuses its memory
                self._wait()
                gradients_S.copy_(wire_S)
        self._wait()
        self._is_done = True

    def _wait(self) -> None:
        for _, work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def abandon(self) -> list[tuple[GroupBackend, Work]]:
        """Forget the sums in flight without waiting for them; returns the group and the work of each, which may still
        use the memory of the gradients."""
        in_flight, self._in_flight = self._in_flight, []
        return in_flight

    def reopen(self, units: Iterable[tuple[FlatGroup, Tensor]]) -> None:
        """A backward adds to the step; see [Note: a second sum in a step]."""
        if not self._is_done:
            return
        for group, gradients_S in units:
            if group.ranks.replicas is not None and group.ranks.replicas.rank > 0:
                gradients_S.zero_()
        self._is_done = False

    def forget(self) -> None:
        """The step is over."""
        self._is_done = False
