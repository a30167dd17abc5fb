"""Stage 1: each rank updates, and keeps the optimizer state of, its own shard of the parameters.

Against stage 0: the parameters of a unit are views of one flat buffer, cut in W equal shards; a full bucket is
reduce-scattered instead of all-reduced; after the update the shards are all-gathered. Bytes per parameter: 8 + 8/W in
fp32, 4 + 12/W in low precision (ZeRO, arXiv 1910.02054, section 5.1: P_os).
"""

from collections.abc import Sequence

from torch import Tensor

from deepspeed.comm.backend import Work
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.layout import UnitLayout
from deepspeed.zero.strategy import Sharding


class Stage1(Sharding):
    """Optimizer states are sharded."""

    stage = 1

    def _layout(self, numels: Sequence[int], world_size: int) -> UnitLayout:
        if self._is_whole:
            return UnitLayout.whole(numels, world_size)
        return UnitLayout.even(numels, world_size, self._max_fragment_numel())

    def _is_flat(self) -> bool:
        return True

    def _create_bucket(self, index: int) -> Bucket:
        shard = self.groups[index].layout.shard(self.groups[index].rank)
        return self._bucket(index, shard, kept=shard)

    def _reduce(self, bucket: Bucket, wire_N: Tensor) -> Work:
        group = self.groups[bucket.index]
        return group.ranks.shards.reduce_scatter(group.shard_of(wire_N), wire_N, tag=bucket.index)

    def _all_gather_weights(self, index: int) -> Work | None:
        group = self.groups[index]
        assert group.flat_N is not None
        return group.ranks.shards.all_gather(group.flat_N, group.shard_of(group.flat_N), tag=index)

    def _owned_gradients(self, index: int) -> Tensor:
        return self.groups[index].shard_of(self._gradients[index])
