"""A layout says which rank owns which elements: integers only, no tensors, no communication.

A `Sharding` calls these functions when it is attached; so do readers of checkpoints.

Legend: a *unit* is a set of parameters that one collective reduces or gathers; they lie end to end in a flat buffer of
N elements, cut into W equal shards of S elements. A *fragment* is the part of one parameter that lies in one shard.

A checkpoint file holds another division of the same parameters. Each division is a list of `Run`s, which every rank
computes in the same way.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [param_start, param_start + numel) of one parameter, at [start, stop) of its flat buffer."""

    param: int  # index of the parameter within its unit
    param_start: int
    start: int
    stop: int
    owner: int  # rank within the unit's shard group

    @property
    def numel(self) -> int:
        return self.stop - self.start


class UnitLayout:
    """`UnitLayout` says where the parameters of one unit lie in the flat buffer, and which rank owns which elements.

    Args:
        numels: elements of each parameter.
        offsets: offset of each parameter, ascending.
        shard_numel: S.
        world_size: W.
        max_fragment_numel: longer fragments are split, so that an update can process them in parts.
    """

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        shard_numel: int,
        world_size: int,
        max_fragment_numel: int | None = None,
    ) -> None:
        self.numels = tuple(numels)
        self.offsets = tuple(offsets)
        self.shard_numel = shard_numel
        self.world_size = world_size
        self.padded_numel = shard_numel * world_size  #: N
        #: [start, stop) of the flat buffer that belong to no parameter
        self.gaps = tuple(self._find_gaps())
        self._max_fragment_numel = max_fragment_numel or max(shard_numel, 1)
        self.fragments = tuple(fragment for param in range(len(self.numels)) for fragment in self._fragments_of(param))

    @classmethod
    def even(cls, numels: Sequence[int], world_size: int, max_fragment_numel: int | None = None) -> "UnitLayout":
        """Lay parameters out without gaps, padded at the end to W equal shards of an even number of elements."""
        shard_numel = even_shard_numel(sum(numels), world_size)
        offsets = [0, *accumulate(numels)][:-1]
        return cls(numels, offsets, shard_numel, world_size, max_fragment_numel)

    @classmethod
    def whole(cls, numels: Sequence[int], world_size: int) -> "UnitLayout":
        """Divide no parameter: each shard holds a run of whole parameters, padded to the longest run.

        Used for optimizers whose update needs whole parameters.
        """
        cuts = parameter_cuts(numels, world_size)
        shard_numel = max(stop - start for start, stop in pairwise(cuts))
        offsets = []
        rank = position = 0
        for numel in numels:
            while position >= cuts[rank + 1]:
                rank += 1
            offsets.append(rank * shard_numel + position - cuts[rank])
            position += numel
        return cls(numels, offsets, shard_numel, world_size)

    @classmethod
    def single(cls, numels: Sequence[int], max_fragment_numel: int | None = None) -> "UnitLayout":
        """Give everything to one owner, as on every rank of stage 0."""
        return cls(numels, [0, *accumulate(numels)][:-1], sum(numels), 1, max_fragment_numel)

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(self.numels)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) of the flat buffer that `rank` owns, padding included."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def _find_gaps(self) -> list[tuple[int, int]]:
        ends = [0, *(offset + numel for offset, numel in zip(self.offsets, self.numels, strict=True))]
        starts = [*self.offsets, self.padded_numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def padding(self, rank: int) -> int:
        """Return how many elements at the end of the shard of `rank` belong to no parameter."""
        return self.shard_numel - sum(fragment.numel for fragment in self.owned_by(rank))

    def owned_by(self, rank: int) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.owner == rank]

    def fragment_of(self, param: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) of the flat buffer that `rank` owns of a parameter; may be empty."""
        start, stop = self.shard(rank)
        first = self.offsets[param]
        last = first + self.numels[param]
        return min(max(first, start), stop), min(max(last, start), stop)

    def _fragments_of(self, param: int) -> list[Fragment]:
        fragments = []
        first = position = self.offsets[param]
        stop = first + self.numels[param]
        while position < stop:
            owner = position // self.shard_numel
            end = min(stop, (owner + 1) * self.shard_numel, position + self._max_fragment_numel)
            fragments.append(Fragment(param, position - first, position, end, owner))
            position = end
        return fragments


def even_shard_numel(numel: int, world_size: int) -> int:
    """Return S of a unit of `numel` elements: the smallest even S such that W shards hold the unit."""
    return -(-numel // (2 * world_size)) * 2


def even_cuts(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return W + 1 offsets that divide parameters laid end to end evenly, padded to a multiple of 2 W, as in
    DeepSpeed's files of stages 1 and 2."""
    unit = 2 * world_size
    padded = -(-sum(numels) // unit) * unit
    return tuple(padded // world_size * rank for rank in range(world_size + 1))


def parameter_cuts(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return W + 1 offsets at boundaries between parameters, each the nearest to the even offset.

    Runs may differ by up to the largest parameter.
    """
    boundaries = (0, *accumulate(numels))
    total = boundaries[-1]
    cuts = [0]
    for rank in range(1, world_size):
        wanted = total * rank / world_size
        nearest = min(boundaries, key=lambda boundary: abs(boundary - wanted))
        cuts.append(max(nearest, cuts[-1]))
    return (*cuts, total)


def divide_into_units(numels: Sequence[int], positions: Sequence[int], max_numel: int) -> list[list[int]]:
    """Group parameters into runs of at most `max_numel` elements, in the order in which a backward fills them.

    Args:
        numels: elements of each parameter.
        positions: place of each parameter in the module; a backward visits high places first.
        max_numel: upper bound of a run; a longer parameter is a run of its own.

    Returns:
        lists of indices, each in module order.
    """
    runs: list[list[int]] = []
    numel = 0
    for index in sorted(range(len(numels)), key=lambda each: -positions[each]):
        if not runs or numel + numels[index] > max_numel:
            runs.append([])
            numel = 0
        runs[-1].append(index)
        numel += numels[index]
    return [run[::-1] for run in runs]


class Run(NamedTuple):
    """Elements `[start, start + numel)` of a parameter, at `offset` of the buffer of the rank `owner`."""

    param: int
    start: int
    numel: int
    owner: int
    offset: int


def in_parameters(numels: Sequence[int], world_size: int) -> list[Run]:
    """Split each parameter of n elements into padded parts of ceil(n / W), laid end to end: files of stage 3."""
    runs = []
    offset = 0
    for param, numel in enumerate(numels):
        size = math.ceil(numel / world_size)
        for rank in range(world_size):
            start = min(rank * size, numel)
            runs.append(Run(param, start, min(size, numel - start), rank, offset))
        offset += size
    return runs


def contiguous(numels: Sequence[int], cuts: Sequence[int]) -> list[Run]:
    """Lay all parameters end to end and divide them at W + 1 offsets: files of stages 0 to 2."""
    runs = []
    for param, (first, last) in enumerate(pairwise((0, *accumulate(numels)))):
        start = first
        for owner in range(bisect_right(cuts, first) - 1, len(cuts) - 1):
            if start == last:
                break
            stop = min(last, cuts[owner + 1])
            if start < stop:
                runs.append(Run(param, start - first, stop - start, owner, start - cuts[owner]))
            start = max(start, stop)
    return runs
