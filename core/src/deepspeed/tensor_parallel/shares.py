"""The functions of this file spread heads, features and vocabulary tokens over tensor-parallel ranks, in integers.

Sizes need not be multiples of the number of ranks: the first ranks hold one more. A head is never divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.errors import ConfigError, counted

#: [start, stop) along the divided dim of a whole parameter
Range = tuple[int, int]


def spread(total: int, parts: int, grain: int = 1) -> list[Range]:
    """`total` elements in `parts` neighboring ranges, as even as possible.

    Args:
        grain: ranges begin at multiples of this.

    >>> spread(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    >>> spread(10, 2, grain=4)
    [(0, 8), (8, 10)]
    """
    blocks = -(-total // grain)
    cuts = [min(total, grain * (part * (blocks // parts) + min(part, blocks % parts))) for part in range(parts + 1)]
    return [(cuts[part], cuts[part + 1]) for part in range(parts)]


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank.

    Args:
        num_heads: query heads of the whole layer.
        num_kv_heads: key and value heads of the whole layer; each serves `num_heads / num_kv_heads` query heads.
        queries: query heads that this rank holds.
        keys: key and value heads that it holds: those of its query heads.
        is_crowded: there are fewer key and value heads than ranks, so that several ranks may hold the same one.
        counts_keys: no earlier rank holds them.
    """

    num_heads: int
    num_kv_heads: int
    queries: Range
    keys: Range
    is_crowded: bool = False
    counts_keys: bool = True

    @property
    def num_queries(self) -> int:
        """Query heads of this rank."""
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        """Key and value heads of this rank."""
        return self.keys[1] - self.keys[0]


def share_heads(num_heads: int, num_kv_heads: int, num_ranks: int, where: str) -> list[HeadShare]:
    """The heads of each rank.

    Key and value heads are spread over the ranks, each with its query heads. Where there are fewer of them than ranks,
    the ranks are spread over them instead, and those of one key and value head divide its query heads.

    Args:
        where: the layer, for the error.

    Raises:
        ConfigError: if a rank would have no head.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{where}: found {counted(num_heads, 'query head')} and {num_kv_heads} key and value heads; the first must "
            "be a multiple of the second"
        )
    queries_per_key = num_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        ranges = spread(num_kv_heads, num_ranks)
        return [
            HeadShare(num_heads, num_kv_heads, (a * queries_per_key, b * queries_per_key), (a, b)) for a, b in ranges
        ]
    crowd = -(-num_ranks // num_kv_heads)
    if queries_per_key < crowd:
        raise ConfigError(
            f"{where}: found {counted(num_heads, 'query head')} and {num_kv_heads} key and value heads for tensor "
            f"parallelism over {counted(num_ranks, 'rank')}, which leaves {counted(crowd, 'rank')} to "
            f"{counted(queries_per_key, 'query head')} of one key head; use at most "
            f"{counted(num_kv_heads * queries_per_key, 'rank')}"
        )
    shares = []
    for key, (first, stop) in enumerate(spread(num_ranks, num_kv_heads)):
        for place, (a, b) in enumerate(spread(queries_per_key, stop - first)):
            queries = key * queries_per_key + a, key * queries_per_key + b
            keys = (key, key + 1)
            shares.append(HeadShare(num_heads, num_kv_heads, queries, keys, is_crowded=True, counts_keys=place == 0))
    return shares


def scaled(ranges: Sequence[Range], size: int, offset: int = 0) -> tuple[Range, ...]:
    """Ranges of heads as ranges of elements: `size` elements each, the first of them at `offset`."""
    return tuple((offset + start * size, offset + stop * size) for start, stop in ranges)
