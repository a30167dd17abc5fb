"""Sub-groups: runs of shards of one unit that are updated together, and swapped together.

Cut when a unit is laid out (`holding.py`). They bound what an optimizer whose states are in swap files has in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed.zero.flat_group import ParamShard


@dataclass(frozen=True, eq=False)
class SubGroup:
    """Shards that lie end to end in this rank's shard of a unit, of one dtype and one group of the optimizer.

    Attributes:
        shards: at least one.
        start: of the first of them, in elements from the beginning of this rank's shard.
        numel: of all of them.
    """

    shards: tuple[ParamShard, ...]
    start: int
    numel: int

    def starts(self) -> Iterator[tuple[ParamShard, int]]:
        """Each shard, and where it begins, in elements from the beginning of the sub-group."""
        start = 0
        for shard in self.shards:
            yield shard, start
            start += shard.fragment.numel


def divide(shards: Sequence[ParamShard], max_numel: int) -> list[SubGroup]:
    """All shards of a unit in sub-groups of at most `max_numel` elements; a longer shard is one by itself."""
    runs: list[list[ParamShard]] = []
    numel = 0
    for shard in shards:
        if not runs or numel + shard.fragment.numel > max_numel:
            runs.append([])
            numel = 0
        runs[-1].append(shard)
        numel += shard.fragment.numel
    first = shards[0].fragment.start if shards else 0
    return [
        SubGroup(tuple(run), run[0].fragment.start - first, sum(shard.fragment.numel for shard in run)) for run in runs
    ]
