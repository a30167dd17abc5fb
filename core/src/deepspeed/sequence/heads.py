"""`HeadDivision` says which attention heads each rank of a sequence-parallel group computes, in pure integers.

    heads = HeadDivision(num_heads=6, num_kv_heads=2, num_ranks=3)
    heads.query                  # ((0, 2), (2, 4), (4, 6)): half-open ranges by rank
    heads.key_value              # ((0, 1), (0, 2), (1, 2)): what those query heads attend to
    heads.local_kv_index(1)      # (0, 1): for each query head of rank 1, its head among the rank's own KV heads

Query heads are divided as evenly as the numbers allow: the first ranks have one more. A KV head that
query heads of several ranks share goes to each of them.
"""

import functools
from dataclasses import dataclass

from deepspeed.errors import counted

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadDivision:
    """The heads of one attention layer by rank.

    num_heads: query heads of the whole layer.
    num_kv_heads: its key and value heads, a divisor of `num_heads`.
    num_ranks: ranks that share the sequence.
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention: found {counted(self.num_heads, 'query head')} with {self.num_kv_heads} key and value "
                "heads; the former must be a multiple of the latter"
            )
        if self.num_heads < self.num_ranks:
            raise ValueError(
                f"sequence parallelism: found {counted(self.num_heads, 'attention head')} for "
                f"{counted(self.num_ranks, 'rank')}, and each rank needs a head; use at most "
                f"{counted(self.num_heads, 'rank')} per sequence, or deepspeed.sequence.ring.RingAttention, which "
                "divides no heads"
            )

    @functools.cached_property
    def query(self) -> tuple[Range, ...]:
        """Query heads of each rank; together all of them."""
        size, extra = divmod(self.num_heads, self.num_ranks)
        stops = [(rank + 1) * size + min(rank + 1, extra) for rank in range(self.num_ranks)]
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    @functools.cached_property
    def key_value(self) -> tuple[Range, ...]:
        """KV heads of each rank; ranges of neighbors overlap where they share a head."""
        group = self.num_heads // self.num_kv_heads
        return tuple((start // group, -(-stop // group)) for start, stop in self.query)

    @functools.cache  # noqa: B019 - divisions are few and small
    def local_kv_index(self, rank: int) -> tuple[int, ...]:
        """Return for each query head of `rank` the place of its KV head among the rank's own KV heads."""
        group = self.num_heads // self.num_kv_heads
        (start, stop), (first, _) = self.query[rank], self.key_value[rank]
        return tuple(head // group - first for head in range(start, stop))

    def is_grouped(self, rank: int) -> bool:
        """Whether the rank's KV heads serve equal numbers of its query heads, in order, as attention functions for
        grouped heads expect. Otherwise KV heads are repeated by `local_kv_index`."""
        index = self.local_kv_index(rank)
        num_kv = self.key_value[rank][1] - self.key_value[rank][0]
        size, rest = divmod(len(index), num_kv)
        return rest == 0 and index == tuple(head // size for head in range(len(index)))


@functools.lru_cache(maxsize=256)
def divide_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadDivision:
    """The division, made once; see `HeadDivision` for the arguments and errors."""
    return HeadDivision(num_heads, num_kv_heads, num_ranks)
