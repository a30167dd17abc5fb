"""Where stage 3 keeps the shard of a unit between its all-gathers, if not beside the whole parameters.

Asked for by `offload_param` and by `zero.Init(remote_device=...)`. `ShardHome` is the contract;
`offload/host_shards.py` and `offload/swapped_shards.py` answer it, and `offload/policy.py` chooses. A unit
(`param_unit.py`) calls, in this order:

    1. keep         once, with the values of its shard
    2. read_ahead   when its next all-gather is expected soon; only a hint
    3. prepare      before that all-gather: the only call that may fail because values are lost
    4. copied_to    around the all-gather, which then reads the copy
    5. arrived      when that all-gather is over
    6. settle       before values are stored by others than the unit
    7. store        new values, part by part

`NearShard` is a second copy of the weights, beside it.

Legend: S numel of a shard.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend


class OffloadedShard(ABC):
    """This rank's shard of one unit.

    Args:
        shard_S: its memory; on the meta device if it has none.
    """

    def __init__(self, shard_S: Tensor) -> None:
        self.shard_S = shard_S

    def read_ahead(self) -> bool:
        """Bring the values nearer; False: nothing to do, or no room to do it for this unit and those after it."""
        return False

    @abstractmethod
    def prepare(self) -> None:
        """The values are about to be copied.

        Raises:
            OSError: they are lost.
        """

    @abstractmethod
    def copied_to(self, part_S: Tensor) -> AbstractContextManager[None]:
        """Starts to copy the values to `part_S`, in the accelerator's memory; what is issued inside comes after it."""

    @abstractmethod
    def arrived(self) -> None:
        """The computation that follows comes after that copy."""

    @abstractmethod
    def settle(self) -> None:
        """Forget what was read ahead, and return when nothing reads the values any more."""

    @abstractmethod
    def load(self, start: int, numel: int) -> Tensor:
        """The elements [start, start + numel), in host memory; to be read only."""

    @abstractmethod
    def target(self, start: int, numel: int) -> Tensor:
        """Host memory for new values of [start, start + numel), which `store` is then called with."""

    @abstractmethod
    def store(self, start: int, values: Tensor) -> None:
        """Keep new values, 1-D, from the element `start` on; of another dtype, they are rounded. Where they are in host
        memory they may not be changed before the next `settle`."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The elements [start, start + numel) of an offloaded shard."""

    shard: OffloadedShard
    start: int
    numel: int

    def load(self) -> Tensor:
        """As `OffloadedShard.load`."""
        return self.shard.load(self.start, self.numel)

    def target(self) -> Tensor:
        """As `OffloadedShard.target`."""
        return self.shard.target(self.start, self.numel)

    def store(self, values: Tensor) -> None:
        """As `OffloadedShard.store`; `values` of any shape."""
        self.shard.store(self.start, values.detach().view(-1))


class ShardHome(ABC):
    """Keeps the shards of the units of one engine."""

    #: as the configuration names it
    name = ""

    @abstractmethod
    def keep(self, values_S: Tensor, name: str) -> OffloadedShard | None:
        """Take over a shard, whose values are copied; None: it stays where it is.

        Args:
            name: of the unit, for errors.
        """

    def check(self) -> None:  # noqa: B027 - memory does not get lost
        """Called before all values are read for the last time.

        Raises:
            OSError: they are lost.
        """

    @abstractmethod
    def release(self) -> None:
        """Drop all values."""


class NearShard:
    """This rank's part of a second copy of a unit's weights, held by a small group of ranks. Owned by `ParamUnit`.

    The first all-gather after an update runs over all ranks. Each rank keeps its part of the result, and until the
    weights change again all-gathers run in the small group: that of the backward, and those of later micro-batches. It
    costs the weights in the model's dtype once per small group. N is the padded numel of the unit.

    Source: hpZ of G. Wang et al., ZeRO++, arXiv 2306.10209, section 3.2.

    Args:
        ranks: the small group, whose size divides that of the group that shards the unit.
    """

    def __init__(self, ranks: GroupBackend) -> None:
        self.ranks = ranks
        self.shard: Tensor | None = None  # [N / ranks]
        self.is_exact = False  # as in `ParamUnit`
        self._is_current = False

    def serves(self, *, exact: bool) -> bool:
        """Whether an all-gather may run in the small group."""
        return self._is_current and (self.is_exact or not exact)

    def keep(self, full_N: Tensor, *, is_exact: bool) -> None:
        """Take this rank's part of the whole weights, if it has none of these weights yet."""
        if self._is_current:
            return
        part = full_N.view(self.ranks.world_size, -1)[self.ranks.rank]
        if self.shard is None:
            self.shard = torch.empty_like(part)
        self.shard.copy_(part)
        self.is_exact, self._is_current = is_exact, True

    def forget(self) -> None:
        """The weights change."""
        self._is_current = False
