"""`GradientShards`: memory of this rank's reduced gradients where they are sharded (stages 2 and 3).

A shard has memory from its first sum until the step is over; between steps there is none. The tensors, and the views
that the optimizer's side has of them, stay, as those of released weights do (`param_unit.py`).
"""

import torch
from torch import Tensor

from deepspeed.comm.backend import Work
from deepspeed.comm.work import DONE


class GradientShards:
    """The shards of one engine, by unit."""

    def __init__(self) -> None:
        self._shards: dict[int, Tensor] = {}
        self._summed: set[int] = set()  # units whose shard has memory, with a sum of this step

    def create(self, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The shard [S] of the unit `index`, with memory until `free` is called."""
        self._shards[index] = torch.empty(numel, dtype=dtype, device=device)
        return self._shards[index]

    def add_up(self, index: int, work: Work, sum_S: Tensor) -> Work:
        """Add what a bucket has reduced to the sum of the step; a `Keep` (`placement.py`)."""
        work.wait()
        if index in self._summed:
            self._shards[index].add_(sum_S)
        else:
            self._take_memory(index).copy_(sum_S)
        return DONE

    def zero_without_sum(self) -> None:
        """Zero those that no backward reduced, as when gradients are set from outside."""
        for index in self._without_sum():
            self._take_memory(index).zero_()

    def allocate(self) -> None:
        """Memory with arbitrary contents for those without: a view needs it while it is made."""
        for index in self._without_sum():
            self._resize(self._shards[index], self._shards[index].nbytes)

    def free(self) -> None:
        """Give the memory of those without a sum back."""
        for index in self._without_sum():
            self._resize(self._shards[index], 0)

    def forget(self) -> None:
        """The step is over."""
        self._summed.clear()
        self.free()

    def leave(self) -> None:
        """Drop the shards without giving their memory back: works in flight use it."""
        self._shards.clear()
        self._summed.clear()

    def _take_memory(self, index: int) -> Tensor:
        shard_S = self._shards[index]
        self._resize(shard_S, shard_S.nbytes)
        self._summed.add(index)
        return shard_S

    def _without_sum(self) -> list[int]:
        return [index for index in self._shards if index not in self._summed]

    @staticmethod
    def _resize(shard_S: Tensor, num_bytes: int) -> None:
        shard_S.untyped_storage().resize_(num_bytes)
