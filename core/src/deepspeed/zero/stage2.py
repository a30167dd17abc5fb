"""Stage 2: gradients are sharded too. It is stage 1 with another place for gradients to be.

A bucket's buffer is borrowed from a small pool, from its first gradient until its sum was added to this rank's shard,
whose memory is allocated then, and freed after the step. So gradients are reduced after every backward, also between
two steps, and a rank keeps 4 + 12/W bytes per parameter in fp32, 2 + 14/W in low precision (P_os+g).
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.work import DONE
from deepspeed.zero.bucket import Bucket, BucketPool
from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.holding import ShardingOptions
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
        self._pools: dict[tuple[torch.dtype, torch.device], BucketPool] = {}
        self._summed: set[int] = set()  # units whose gradient shard has memory, with a sum of this step

    def _max_in_flight(self) -> int | None:
        return MAX_IN_FLIGHT

    def _is_alone(self, group: FlatGroup) -> bool:
        """One rank that keeps its gradients beside its weights: its shard is the whole buffer, so none is borrowed."""
        return group.ranks.world_size == 1 and not self.placement.is_apart

    def _create_gradients(self, group: FlatGroup, dtype: torch.dtype) -> Tensor:
        if self._is_alone(group):
            return super()._create_gradients(group, dtype)
        numel = 0 if self.placement.is_apart else group.layout.shard_numel
        return torch.empty(numel, dtype=dtype, device=group.device)

    def _owned_gradients(self, index: int) -> Tensor:
        return self._gradients[index]

    def _create_bucket(self, index: int) -> Bucket:
        group = self.groups[index]
        if self._is_alone(group):
            return super()._create_bucket(index)
        shard = group.layout.shard(group.rank)
        return Bucket(
            index,
            group.layout,
            shapes=group.shapes,
            pool=self._pool(self._accumulation_dtype(group.dtype), group.device),
            result=shard,
            kept=shard,
            wire_dtype=self.options.wire_dtype,
            keep=self.placement.keeper(adds=True) or self._add_up,
        )

    def _add_up(self, index: int, work: Work, sum_S: Tensor) -> Work:
        """Add a reduced shard to the sum of the step."""
        work.wait()
        if index in self._summed:
            self._gradients[index].add_(sum_S)
        else:
            self._take_memory(index).copy_(sum_S)
        return DONE

    def _take_memory(self, index: int) -> Tensor:
        """The gradients of a unit, with memory and arbitrary contents."""
        gradients_S = self._gradients[index]
        gradients_S.untyped_storage().resize_(gradients_S.nbytes)
        self._summed.add(index)
        return gradients_S

    def _connect_shards(self) -> None:
        for index in self._without_sum():  # a view needs memory while it is made
            self._gradients[index].untyped_storage().resize_(self._gradients[index].nbytes)
        super()._connect_shards()
        self._free_memory()

    def _free_memory(self) -> None:
        """Give the memory of gradients without a sum back. The tensors, and the views that shards have of them, stay,
        as those of released weights do (`param_unit.py`)."""
        for index in self._without_sum():
            self._gradients[index].untyped_storage().resize_(0)

    def _without_sum(self) -> list[int]:
        """Units whose gradient shard is not needed now."""
        count = len(self._gradients)  # a new unit has none yet
        return [index for index in range(count) if index not in self._summed and not self._is_alone(self.groups[index])]

    def _local_norms(self) -> list[Tensor]:
        for index in self._without_sum():
            self._take_memory(index).zero_()  # no backward reduced it, as when gradients are set from outside
        return super()._local_norms()

    def _pool(self, dtype: torch.dtype, device: torch.device) -> BucketPool:
        """The pool for buckets of this dtype and device."""
        if (dtype, device) not in self._pools:
            self._pools[dtype, device] = BucketPool(
                MAX_IN_FLIGHT, lambda numel: self.backend.allocate(numel, dtype, device)
            )
        return self._pools[dtype, device]

    def zero_grad(self) -> None:
        super().zero_grad()
        self._summed.clear()
        self._free_memory()

    @property
    def exchange_bytes(self) -> int:
        return super().exchange_bytes + sum(pool.free_bytes for pool in self._pools.values())

    def destroy(self) -> None:
        super().destroy()
        self._pools.clear()
