"""`SavedGroup`: the elements of one group of a checkpoint, as this run's units hold them and as its files do.

A file divides parameters in another way than units do (`division.py`). Values move between the two a window at a time,
so that a save or a load holds little more than the file's part, or what is kept of it. Legend: T elements of this
rank's part of the group in its file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.optim.saved_values import master_dtype
from deepspeed.zero.division import Run, contiguous, in_parameters
from deepspeed.zero.layout import even_cuts, parameter_cuts
from deepspeed.zero.param_unit import shape_of
from deepspeed.zero.pending_tensor import PendingTensor
from deepspeed.zero.placement import MASTER
from deepspeed.zero.redistribute import pieces_of, redistribute

if TYPE_CHECKING:
    from deepspeed.zero.flat_group import FlatGroup, ParamShard
    from deepspeed.zero.stateful import Stateful

_WINDOW_NUMEL = 2**19  # per rank


@dataclass
class Window:
    """Some units of a group, whose elements move together."""

    shards: list[ParamShard] = field(default_factory=list)
    """Of this rank."""
    here: list[Run] = field(default_factory=list)
    """Of every copy of the weights; a rank's shards lie end to end."""
    first_copy: list[Run] = field(default_factory=list)
    in_file: list[Run] = field(default_factory=list)
    numel: int = 0
    """Of all ranks."""

    @property
    def numel_here(self) -> int:
        """Of this rank's shards."""
        return sum(shard.fragment.numel for shard in self.shards)


class SavedGroup:
    """One group of a checkpoint: its parameters, and where their elements are here and in the files."""

    def __init__(self, sharding: Stateful, index: int) -> None:
        self._sharding = sharding
        self.params = sharding.saved_groups[index]  # attached indices, in the order of the file
        #: index of the optimizer's group that has them
        self.param_group = next(each.param_group for each in sharding.groups if each.first_index in self.params)
        #: whose files divide the group: all that hold its parameters
        self.ranks = sharding.unit_groups.of(sharding.params[self.params[0]]).everyone
        self._ranks = None if sharding.stage == 0 else self.ranks
        self.place = {param: position for position, param in enumerate(self.params)}
        self.shapes = [shape_of(sharding.params[param]) for param in self.params]
        self.numels = [shape.numel() for shape in self.shapes]
        self.in_file, self.numel_in_file = self._divide_for_file()
        rank = self.ranks.rank if sharding.stage > 0 else 0
        own = sum(run.numel for run in self.in_file if run.owner == rank)
        self.padding = self.numel_in_file - own  # elements of this rank's part that belong to no parameter
        self.windows = list(self._divide_in_windows())
        self.shards = [shard for window in self.windows for shard in window.shards]  # of this rank

    def _divide_for_file(self) -> tuple[list[Run], int]:
        sharding, world_size = self._sharding, self.ranks.world_size
        if sharding.stage == 3:
            size = sum(math.ceil(numel / world_size) for numel in self.numels)
            return in_parameters(self.numels, world_size), size
        if sharding.stage == 0:
            return contiguous(self.numels, (0, sum(self.numels))), sum(self.numels)
        cut = parameter_cuts if sharding.keeps_parameters_whole else even_cuts
        cuts = cut(self.numels, world_size)
        return contiguous(self.numels, cuts), cuts[self.ranks.rank + 1] - cuts[self.ranks.rank]

    def _divide_in_windows(self) -> Iterator[Window]:
        in_file: dict[int, list[Run]] = {}
        for run in self.in_file:
            in_file.setdefault(run.param, []).append(run)
        window, used = Window(), dict[int, int]()  # elements, by owner
        for group in self._sharding.groups:
            if group.first_index in self.place:
                numel = sum(group.layout.numels)
                if window.numel and window.numel + numel > _WINDOW_NUMEL * self.ranks.world_size:
                    yield window
                    window, used = Window(), {}
                self._add(group, window, used, in_file)
        yield window

    def _add(self, group: FlatGroup, window: Window, used: dict[int, int], in_file: Mapping[int, list[Run]]) -> None:
        for each in group.layout.fragments:
            param, offset = self.place[group.first_index + each.param], used.get(each.owner, 0)
            runs = [
                Run(param, each.param_start, each.numel, holder, offset) for holder in group.ranks.holders(each.owner)
            ]
            window.here += runs
            window.first_copy.append(runs[0])
            used[each.owner] = offset + each.numel
        for number in range(len(group.params)):
            window.in_file += in_file[self.place[group.first_index + number]]
        window.shards += group.shards
        window.numel += sum(group.layout.numels)

    def owners(self) -> tuple[dict[int, int], dict[int, int]]:
        """The rank that has a parameter, by its place: here and in the files. Where parameters are whole."""
        here = {run.param: run.owner for window in self.windows for run in window.here}
        return here, {run.param: run.owner for run in self.in_file}

    def to_file(self, values: Iterable[Tensor | None], dtype: torch.dtype, *, is_held: bool | None = None) -> Any:
        """[T], from one value per shard of this rank, None for zeros; an iterator is read one by one.

        Args:
            is_held: as of a `PendingTensor`, which is returned where the values are in host memory; None: a tensor.
        """
        device = self.shards[0].master.device if self.shards else torch.device("cpu")
        if is_held is not None and device.type == "cpu" and not any(shard.placement.fetches for shard in self.shards):
            pieces = list(self._pieces(iter(values), dtype))
            return PendingTensor(torch.Size([self.numel_in_file]), dtype, pieces, is_held)
        part_T = self._sharding.placement.scratch(self.numel_in_file, dtype, device)
        remaining = iter(values)
        for window in self.windows:
            flat = torch.zeros(window.numel_here, dtype=dtype, device=device)
            numels = [shard.fragment.numel for shard in window.shards]
            for place, value in zip(flat.split(numels), remaining, strict=False):
                if value is not None:
                    place.copy_(value.detach().reshape(-1))
            redistribute(flat, window.first_copy, window.in_file, part_T, self._ranks)
        return part_T

    def _pieces(self, values: Iterator[Tensor | None], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Where the elements of this rank's part of the file are, by their place in it."""
        for window in self.windows:
            sources, start = [], 0
            for shard in window.shards:
                numel, value = shard.fragment.numel, next(values)
                found = torch.zeros(numel, dtype=dtype) if value is None else value.detach().reshape(-1)
                sources.append((start, found.to("cpu", dtype)))
                start += numel
            yield from pieces_of(sources or [(0, torch.zeros(0, dtype=dtype))], window.first_copy, window.in_file,
                                 self._ranks)  # fmt: skip

    @property
    def master_dtype(self) -> torch.dtype:
        """Of the group's master weights in files: the same on all ranks."""
        return master_dtype(self._sharding.params[self.params[0]].dtype)

    @property
    def has_masters(self) -> bool:
        """Whether all master weights are other memory than the model's weights."""
        return all(shard.has_master for shard in self.shards)

    def masters(self) -> Iterator[Tensor]:
        """The master weights of this rank's shards."""
        return (shard.placement.read(shard, MASTER, shard.master) for shard in self.shards)

    def states(self, name: str, held: Sequence[Mapping[str, Any]]) -> Iterator[Tensor | None]:
        """The state `name` of this rank's shards, from the optimizer's of each."""
        return (
            shard.placement.read(shard, name, state[name]) if name in state else None
            for shard, state in zip(self.shards, held, strict=True)
        )

    def from_file(self, part_T: Tensor, window: Window) -> list[Tensor]:
        """One 1-D tensor per shard of this rank in a window."""
        flat = part_T.new_zeros(window.numel_here)
        redistribute(part_T.reshape(-1), window.in_file, window.here, flat, self._ranks)
        return list(flat.split([shard.fragment.numel for shard in window.shards]))
