"""Stage 2: gradients are sharded too. It is stage 1 with another place for gradients to be.

A bucket's buffer is borrowed from a small pool, from its first gradient until its sum was added to this rank's shard
(`gradient_shards.py`). So gradients are reduced after every backward, also between two steps, and a rank keeps
4 + 12/W bytes per parameter in fp32, 2 + 14/W in low precision (P_os+g).
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend
from deepspeed.zero.bucket import Bucket, BucketPool
from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.gradient_shards import GradientShards
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.placement import Keep
from deepspeed.zero.stage1 import Stage1

#: buckets in flight at the same time, and buffers that wait for reuse. A bound for what this rank starts: a hook waits
#: for no peer, so it is exceeded where peers are late
MAX_IN_FLIGHT = 2


class Stage2(Stage1):
    """Optimizer states and gradients are sharded."""

    stage = 2
    reduces_always = True

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        super().__init__(options, backend, group)
        self._gradient_shards = GradientShards()
        self._pools: dict[tuple[torch.dtype, torch.device], BucketPool] = {}

    def _max_in_flight(self) -> int | None:
        return MAX_IN_FLIGHT

    def _is_alone(self, group: FlatGroup) -> bool:
        """One rank that keeps its gradients beside its weights: its shard is the whole buffer, so none is borrowed."""
        return group.ranks.world_size == 1 and not group.placement.is_offloaded

    def _create_gradients(self, index: int, dtype: torch.dtype) -> Tensor:
        group = self.groups[index]
        if self._is_alone(group):
            return super()._create_gradients(index, dtype)
        numel = 0 if group.placement.is_offloaded else group.layout.shard_numel
        return self._gradient_shards.create(index, numel, dtype, group.device)

    def _owned_gradients(self, index: int) -> Tensor:
        return self._gradients[index]

    def _create_bucket(self, index: int) -> Bucket:
        group = self.groups[index]
        shard = group.layout.shard(group.rank)
        return self._bucket(index, shard, kept=shard, pool=None if self._is_alone(group) else self._pool(group))

    def _pool(self, group: FlatGroup) -> BucketPool:
        dtype, device = self._accumulation_dtype(group.dtype), group.device
        new = BucketPool(MAX_IN_FLIGHT, lambda numel: self.backend.allocate(numel, dtype, device))
        return self._pools.setdefault((dtype, device), new)

    def _keeper(self, index: int, *, pooled: bool) -> Keep | None:
        return super()._keeper(index, pooled=pooled) or (self._gradient_shards.add_up if pooled else None)

    def _connect_shards(self) -> None:
        self._gradient_shards.allocate()
        super()._connect_shards()
        self._gradient_shards.free()

    def _local_norms(self) -> list[Tensor]:
        self._gradient_shards.zero_without_sum()
        return super()._local_norms()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._gradient_shards.forget()

    def _drop_gradient_memory(self) -> None:
        super()._drop_gradient_memory()
        self._gradient_shards.leave()

    def drop_free_buffers(self) -> None:
        for pool in self._pools.values():
            pool.drop_free()

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + sum(pool.free_bytes for pool in self._pools.values())

    def destroy(self) -> None:
        super().destroy()
        self._gradient_shards = GradientShards()
        self._pools.clear()
