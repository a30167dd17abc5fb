"""`NearShard`: this rank's part of a second copy of a unit's weights, held by a small group of ranks (hpZ of ZeRO++).

The first all-gather after an update runs over all ranks. Each rank keeps its part of the result, and until the weights
change again all-gathers run in the small group: that of the backward, and those of later micro-batches. It costs the
weights in the model's dtype once per small group. Owned by `ParamUnit`.

Source: G. Wang et al., ZeRO++, arXiv 2306.10209, section 3.2.

Legend: N padded numel of the unit.
"""

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend


class NearShard:
    """Args:
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
