"""How files divide parameters among ranks: integers only.

A rank keeps shards of units; a checkpoint file holds another division of the same parameters. Both are lists of `Run`s,
which every rank computes alike.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Run(NamedTuple):
    """Elements `[start, start + numel)` of a parameter, at `offset` of the buffer of the rank `owner`."""

    param: int
    start: int
    numel: int
    owner: int
    offset: int


def in_parameters(numels: Sequence[int], world_size: int) -> list[Run]:
    """Each parameter of n elements in parts of ceil(n / W), padded, laid end to end: files of stage 3."""
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
    """All parameters laid end to end and divided at W + 1 offsets: files of stages 0 to 2."""
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
