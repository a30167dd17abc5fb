"""Stage 2: gradients are sharded too. It is stage 1 with another place for a full bucket to go.

A bucket that this rank owns lives in its shard of S elements, unless that is in another memory (`placement.py`). Any
other bucket lives in a buffer from a small pool, from its first gradient until it has been sent. So gradients are
exchanged after every backward, also between two steps, and a rank keeps 4 + 12/W bytes per parameter in fp32, 2 + 14/W
in low precision (P_os+g).
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Backend
from deepspeed.zero.bucket import Bucket, BucketPool
from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.layout import BucketSpec
from deepspeed.zero.stage1 import Stage1

#: buckets on their way at the same time; the next launch waits for the oldest
MAX_IN_FLIGHT = 2


class Stage2(Stage1):
    """Optimizer states and gradients are sharded."""

    stage = 2
    reduces_always = True

    def __init__(self, options: ShardingOptions, backend: Backend, group: ProcessGroup | None = None) -> None:
        super().__init__(options, backend, group)
        self._max_in_flight = MAX_IN_FLIGHT
        self._pools: dict[tuple[torch.dtype, torch.device], BucketPool] = {}

    def _create_gradients(self, group: FlatGroup, dtype: torch.dtype) -> Tensor:
        start, stop = (0, 0) if self.placement.is_apart else group.layout.partition(self.rank)
        return self.placement.pinned(self.backend.allocate(stop - start, dtype, group.params[0].device))

    def _owned_gradients(self) -> list[Tensor]:
        return self._gradients

    def _bucket_memory(self, spec: BucketSpec) -> Tensor:
        start = self.groups[spec.group].partition_start
        return self._gradients[spec.group][spec.start - start : spec.stop - start]

    def _create_bucket(self, spec: BucketSpec) -> Bucket:
        is_owner = spec.owner == self.rank
        if is_owner and not self.placement.is_apart:
            return super()._create_bucket(spec)
        group = self.groups[spec.group]
        pool = self._pool(self._accumulation_dtype(group), group.params[0].device)
        return Bucket(
            spec,
            is_holder=False,
            take=pool.take,
            give=pool.give,
            wire_dtype=self.options.wire_dtype,
            keep=self.placement.keeper(adds=True) if is_owner else None,
        )

    def _pool(self, dtype: torch.dtype, device: torch.device) -> BucketPool:
        """The pool for buckets of this dtype and device."""
        if (dtype, device) not in self._pools:
            self._pools[dtype, device] = BucketPool(
                MAX_IN_FLIGHT, lambda numel: self.backend.allocate(numel, dtype, device)
            )
        return self._pools[dtype, device]

    @property
    def exchange_bytes(self) -> int:
        return super().exchange_bytes + sum(pool.free_bytes for pool in self._pools.values())

    def destroy(self) -> None:
        super().destroy()
        self._pools.clear()
