"""What `NvmePlacement` knows of a unit whose optimizer side is swapped out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.zero.offload.swap_file import Region, SwapFile, SwapWork
from deepspeed.zero.placement import GRADIENT, MASTER
from deepspeed.zero.sub_groups import SubGroup


class SwappedTensor(NamedTuple):
    """Master weights, gradients or one state of a sub-group, end to end."""

    region: Region
    dtype: torch.dtype


class SwappedGroup:
    """A sub-group and its regions.

    Args:
        master_dtype, gradient_dtype: of its master weights and reduced gradients.
        num_spares: regions for states of which only the number is known, so that the disk has space for them.
    """

    def __init__(
        self,
        sub_group: SubGroup,
        file: SwapFile,
        *,
        master_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        num_spares: int,
    ) -> None:
        self.sub_group = sub_group
        self.numel = sub_group.numel
        self._file = file
        self.tensors = {
            name: SwappedTensor(file.allocate(self.numel * dtype.itemsize), dtype)
            for name, dtype in ((GRADIENT, gradient_dtype), (MASTER, master_dtype))
        }
        self._spares = [file.allocate(self.numel * master_dtype.itemsize) for _ in range(num_spares)]

    def tensor(self, name: str, dtype: torch.dtype) -> SwappedTensor:
        """The tensor `name`; made if the group has none of that dtype."""
        found = self.tensors.get(name)
        if found is None or found.dtype != dtype:
            found = self.tensors[name] = SwappedTensor(self._region(self.numel * dtype.itemsize), dtype)
        return found

    def _region(self, num_bytes: int) -> Region:
        fitting = [spare for spare in self._spares if spare.num_bytes == num_bytes]
        if not fitting:
            return self._file.allocate(num_bytes)
        self._spares.remove(fitting[0])
        return fitting[0]


@dataclass(slots=True)
class SwappedUnit:
    """The sub-groups of a unit, and what is known of its reduced gradients."""

    groups: list[SwappedGroup]
    gradient_dtype: torch.dtype
    own: Tensor | None = None  # the sums beside the weights, to which a later backward adds (stage 1)
    has_sum: bool = False  # of this step
    norms: list[Tensor] = field(default_factory=list)  # 0-D, of the sum
    written: SwapWork | None = None  # the last write of the sum

    def finish_writing(self) -> None:
        """Return when the sum is in the file; raises OSError if it is not."""
        if self.written is not None:
            self.written.wait()
            self.written = None

    def parts(self, buffer_S: Tensor) -> Iterator[tuple[SwappedGroup, Tensor]]:
        """Each sub-group with its elements of a buffer over this rank's shard."""
        for group in self.groups:
            yield group, buffer_S.narrow(0, group.sub_group.start, group.numel)


class Place(NamedTuple):
    """Where a shard is."""

    unit: SwappedUnit
    group: SwappedGroup
    start: int  # in elements from the beginning of the sub-group
