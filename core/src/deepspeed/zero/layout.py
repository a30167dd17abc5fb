"""Who owns which slice: integers only, no tensors, no communication.

Called once per parameter group when a `Sharding` is attached, and by whoever reads a checkpoint.

Legend: a *flat group* is a parameter group laid end to end (N elements, padding at the end); *cuts* are the W+1
offsets at which it is divided among W ranks; a *fragment* is the part of one parameter that one rank owns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [param_start, param_start + numel) of one parameter, at [start, stop) of its flat group."""

    param: int  # index of the parameter within its group
    param_start: int
    start: int
    stop: int
    owner: int  # rank within the data-parallel group

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A run of fragments of one group with one owner: what is reduced in one go."""

    group: int
    start: int
    stop: int
    owner: int
    fragments: tuple[Fragment, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


class GroupLayout:
    """How one flat group is divided.

    Args:
        numels: elements of each parameter, in order.
        cuts: W+1 rising offsets, the first 0; the last is the padded length of the flat group.
        max_fragment_numel: longer fragments are divided, so that an update can go through them piece by piece.
    """

    def __init__(self, numels: Sequence[int], cuts: Sequence[int], max_fragment_numel: int | None = None) -> None:
        self.numels = tuple(numels)
        self.cuts = tuple(cuts)
        self.offsets = (0, *accumulate(self.numels))
        assert self.cuts[0] == 0, self.cuts
        assert self.cuts[-1] >= self.offsets[-1], (self.cuts, self.offsets[-1])
        self._max_fragment_numel = max_fragment_numel or self.padded_numel
        self.fragments = tuple(self._divide())

    @property
    def numel(self) -> int:
        """Elements of the group without padding."""
        return self.offsets[-1]

    @property
    def padded_numel(self) -> int:
        return self.cuts[-1]

    def partition(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the flat group that `rank` owns, padding included."""
        return self.cuts[rank], self.cuts[rank + 1]

    def padding(self, rank: int) -> int:
        """How many elements of the partition of `rank` belong to no parameter."""
        start, stop = self.partition(rank)
        return stop - max(start, min(stop, self.numel))

    def owned_by(self, rank: int) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.owner == rank]

    def _divide(self) -> Iterator[Fragment]:
        owner = 0
        for index, numel in enumerate(self.numels):
            position, stop = self.offsets[index], self.offsets[index + 1]
            assert stop - position == numel
            while position < stop:
                while self.cuts[owner + 1] <= position:
                    owner += 1
                end = min(stop, self.cuts[owner + 1], position + self._max_fragment_numel)
                yield Fragment(index, position - self.offsets[index], position, end, owner)
                position = end


def even_cuts(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Equal partitions; the flat group is padded to a multiple of 2 W, as DeepSpeed's stage 1 and 2 files are."""
    unit = 2 * world_size
    padded = -(-sum(numels) // unit) * unit
    return tuple(padded // world_size * rank for rank in range(world_size + 1))


def parameter_cuts(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Partitions that end between parameters, each cut at the boundary nearest to the even one.

    For optimizers whose update looks at a whole parameter. Partitions may differ by up to the largest parameter.
    """
    boundaries = (0, *accumulate(numels))
    total = boundaries[-1]
    cuts = [0]
    for rank in range(1, world_size):
        wanted = total * rank / world_size
        nearest = min(boundaries, key=lambda boundary: abs(boundary - wanted))
        cuts.append(max(nearest, cuts[-1]))
    return (*cuts, total)


def cut_buckets(layouts: Sequence[GroupLayout], positions: Sequence[Sequence[int]], max_numel: int) -> list[BucketSpec]:
    """All groups cut into buckets, in the order in which a backward is expected to fill them.

    Args:
        layouts: one per flat group.
        positions: for each group and parameter its place in the module; a backward visits high places first.
        max_numel: upper bound of a bucket's length; a longer fragment is a bucket of its own.

    Every rank computes the same list, and reduces in this order whatever order its gradients arrive in.
    """
    keyed: list[tuple[int, BucketSpec]] = []
    for group, layout in enumerate(layouts):
        run: list[Fragment] = []
        for fragment in reversed(layout.fragments):
            if run and (fragment.owner != run[0].owner or run[0].stop - fragment.start > max_numel):
                keyed.append(_close_run(group, run, positions[group]))
                run = []
            run.append(fragment)
        if run:
            keyed.append(_close_run(group, run, positions[group]))
    keyed.sort(key=lambda item: -item[0])  # stable: ties keep the order of the groups
    return [spec for _, spec in keyed]


def _close_run(group: int, run: list[Fragment], positions: Sequence[int]) -> tuple[int, BucketSpec]:
    """The bucket of a run that was collected back to front, and the place of the parameter that fills it last."""
    fragments = tuple(reversed(run))
    spec = BucketSpec(group, fragments[0].start, fragments[-1].stop, fragments[0].owner, fragments)
    return min(positions[fragment.param] for fragment in fragments), spec


def update_batches(layout: GroupLayout, max_numel: int) -> list[list[list[Fragment]]]:
    """For each batch and each rank the fragments that are updated, and then gathered, together.

    All ranks get the same number of batches, so that their gathers line up; a rank may have nothing in one.
    """
    world_size = len(layout.cuts) - 1
    per_rank: list[list[list[Fragment]]] = []
    for rank in range(world_size):
        batches: list[list[Fragment]] = []
        numel = 0
        for fragment in layout.owned_by(rank):
            if not batches or numel + fragment.numel > max_numel:
                batches.append([])
                numel = 0
            batches[-1].append(fragment)
            numel += fragment.numel
        per_rank.append(batches)
    num_batches = max((len(batches) for batches in per_rank), default=0)
    return [[batches[index] if index < len(batches) else [] for batches in per_rank] for index in range(num_batches)]
