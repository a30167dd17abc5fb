"""What `NvmePlacement` knows of a unit whose optimizer side is swapped out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.zero.flat_group import SubGroup
from deepspeed.zero.offload.swap_file import Region, SwapFile, SwapWork, padded
from deepspeed.zero.placement import GRADIENT, MASTER


class SwappedTensor(NamedTuple):
    """Master weights, gradients or one state of a sub-group, end to end."""

    region: Region
    dtype: torch.dtype


class SwappedGroup:
    """A sub-group and its region: master weights, states, gradients, in that order, so that one operation moves all.

    Args:
        master_dtype, gradient_dtype: of its master weights and reduced gradients.
        num_states: for which the region has places, of the dtype of the master weights; they get their names later.
    """

    def __init__(
        self,
        sub_group: SubGroup,
        file: SwapFile,
        *,
        master_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        num_states: int,
    ) -> None:
        self.sub_group = sub_group
        self.numel = sub_group.numel
        sizes = [self.numel * dtype.itemsize for dtype in (*[master_dtype] * (1 + num_states), gradient_dtype)]
        starts = list(accumulate(map(padded, sizes), initial=0))
        self.region = file.allocate(starts[-1])
        master, *self._spares, gradient = map(self.region.part, starts, sizes)
        self.tensors = {MASTER: SwappedTensor(master, master_dtype), GRADIENT: SwappedTensor(gradient, gradient_dtype)}

    def tensor(self, name: str, dtype: torch.dtype) -> SwappedTensor:
        """The tensor `name`; made if the group has none of that dtype."""
        found = self.tensors.get(name)
        if found is None or found.dtype != dtype:
            found = self.tensors[name] = SwappedTensor(self._place(self.numel * dtype.itemsize), dtype)
        return found

    def _place(self, num_bytes: int) -> Region:
        """Of a state: in the group's region, or apart where that has no place for it."""
        for spare in self._spares:
            if num_bytes <= spare.num_bytes:
                self._spares.remove(spare)
                return spare.part(0, num_bytes)
        return self.region.file.allocate(num_bytes)

    def runs(self, names: Iterable[str]) -> list[Region]:
        """The regions of these tensors, as few as possible: those in the group's that follow each other are one."""
        runs: list[Region] = []
        for region in sorted((self.tensors[name].region for name in names), key=lambda region: region.offset):
            last = runs[-1] if runs else None
            if last is not None and last.offset + padded(last.num_bytes) == region.offset < self.region.stop:
                runs[-1] = Region(region.file, last.offset, region.stop - last.offset)
            else:
                runs.append(region)
        return runs


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
