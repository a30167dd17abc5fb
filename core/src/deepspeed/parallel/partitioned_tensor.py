"""`PartitionedTensor` holds a rank's part of a tensor that is divided equally over a group, and can gather the whole.

    part = PartitionedTensor(activation, group)              # each rank keeps 1/W of the elements
    send(part.to_meta()); send(part.data())                  # to the same rank of another group
    whole = PartitionedTensor.from_meta(meta, data, other_group).full()

Pipelines with tensor-parallel stages send activations this way, since all ranks of a stage have equal activations. The
class and its header are those of DeepSpeed's `runtime.utils`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError


def even_cuts(numel: int, num_parts: int) -> list[int]:
    """Return the `num_parts` + 1 boundaries of the parts, from 0 to `numel`; the first parts may have one more."""
    length, longer = divmod(numel, num_parts)
    return [part * length + min(part, longer) for part in range(num_parts + 1)]


class PartitionedTensor:
    """This rank's part of a tensor that is equal on all ranks of `group`.

    Args:
        tensor: the whole tensor, of any shape and dtype; with `partition_meta`, this rank's part from `data`.
        group: the ranks that share the tensor.
        partition_meta: the header from `to_meta`.

    Attributes:
        local_data: this rank's elements, 1-D.
        orig_size: the shape of the whole tensor.
        partition: the boundaries of the parts: W + 1 numbers.
        even_split: whether all parts have the same length.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup, partition_meta: Tensor | None = None) -> None:
        self.group = group
        self.num_parts = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.orig_device: torch.device | str = tensor.device
        if partition_meta is None:
            self.orig_size = list(tensor.shape)
            self.partition = even_cuts(tensor.numel(), self.num_parts)
            start, stop = self.partition[self.rank : self.rank + 2]
            self.local_data = tensor.detach().reshape(-1)[start:stop].clone()
        else:
            self.orig_size, self.partition = self._read(partition_meta)
            self.local_data = tensor.detach().reshape(-1)
            wanted = self.partition[self.rank + 1] - self.partition[self.rank]
            if self.local_data.numel() != wanted:
                raise ConfigError(
                    f"PartitionedTensor: found a part of {self.local_data.numel()} elements on rank {self.rank}, but "
                    f"its header says {wanted}; give the part that `data()` returned with the header"
                )
        self.even_split = self.partition[-1] % self.num_parts == 0

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: ProcessGroup, device: torch.device | str | None = None
    ) -> "PartitionedTensor":
        """Build from `to_meta` and `data` of another rank. `full` returns the tensor on `device`; default: the current
        device.

        Raises ConfigError if the header is malformed or for another number of ranks, or the part has another length.
        """
        made = cls(local_part, group, partition_meta=meta)
        made.orig_device = get_accelerator().current_device_name() if device is None else device
        return made

    def to_meta(self) -> Tensor:
        """Return the header, int64 on the part's device: number of dims, shape, number of parts, rank, boundaries."""
        header = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(header, dtype=torch.int64, device=self.local_data.device)

    def data(self) -> Tensor:
        """This rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's part, 1-D."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """The shape of the whole tensor."""
        return self.orig_size

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """Return the whole tensor with one all-gather. A collective.

        Args:
            device: the device of the result; default: the original device.
        """
        longest = -(-self.partition[-1] // self.num_parts)
        own = torch.zeros(longest, dtype=self.local_data.dtype, device=self.local_data.device)
        own[: self.local_data.numel()] = self.local_data
        gathered = own.new_empty(longest * self.num_parts)
        dist.all_gather_into_tensor(gathered, own, group=self.group)
        if not self.even_split:
            rows = gathered.view(self.num_parts, longest)
            lengths = [stop - start for start, stop in zip(self.partition, self.partition[1:], strict=False)]
            gathered = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        return gathered.view(self.orig_size).to(self.orig_device if device is None else device)

    def _read(self, meta: Tensor) -> tuple[list[int], list[int]]:
        """Return the shape and the boundaries in a header. Raises ConfigError if the header does not fit."""
        numbers: Sequence[int] = meta.tolist()
        dims = numbers[0] if numbers else -1
        shape, rest = list(numbers[1 : 1 + dims]), list(numbers[1 + dims :])
        if dims < 0 or len(rest) < 2 or len(rest) != rest[0] + 3:
            raise ConfigError(f"PartitionedTensor: found the header {numbers}, which is none of `to_meta`")
        if rest[0] != self.num_parts:
            raise ConfigError(
                f"PartitionedTensor: found a header of {rest[0]} parts in a group of {self.num_parts} ranks; "
                "use a group of as many ranks"
            )
        if rest[1] != self.rank:
            raise ConfigError(
                f"PartitionedTensor: found the header of rank {rest[1]} on rank {self.rank}, whose part is another; "
                "exchange parts between ranks of the same place"
            )
        cuts = rest[2:]
        if cuts != even_cuts(torch.Size(shape).numel(), self.num_parts):
            raise ConfigError(f"PartitionedTensor: found the header {numbers}, whose cuts do not fit its shape {shape}")
        return shape, cuts
