"""A list of layers is cut into stages: contiguous parts, none empty, the heaviest part as light as possible."""

import itertools
import re
from bisect import bisect_left
from collections.abc import Sequence

from deepspeed.errors import ConfigError, counted

METHODS = ("parameters", "uniform", "type:REGEX", "profile")


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Cuts of `num_items` layers into parts of as equal length as possible, the first ones longer: `num_parts` + 1
    numbers, from 0."""
    return partition_balanced([1] * num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cuts between layers of these weights, so that the heaviest part is as light as possible.

        >>> partition_balanced([4, 1, 1, 1, 1], num_parts=2)
        [0, 1, 5]

    Among such cuts those with the smallest sum of squares, and among these the ones that give the last parts less.
    Every part has a layer.

    Args:
        weights: of each layer, 0 or more.
        num_parts: at most the number of layers.

    Returns:
        `num_parts` + 1 numbers: part i has the layers from the i-th to before the next.

    Raises:
        ConfigError: there are more parts than layers.
    """
    if not 1 <= num_parts <= len(weights):
        raise ConfigError(
            f"pipeline: found {counted(num_parts, 'part')} for {counted(len(weights), 'layer')}; each part needs a "
            f"layer, so use 1 to {len(weights)}"
        )
    sums = [0, *itertools.accumulate(weights)]
    ends = range(1, len(sums))
    bounds = sorted({sums[stop] - sums[start] for stop in ends for start in range(stop)})
    bound = bounds[bisect_left(bounds, True, key=lambda each: _fits(sums, num_parts, each))]
    return _smoothest(sums, num_parts, bound)


def _fits(sums: Sequence[float], num_parts: int, bound: float) -> bool:
    """Whether parts of at most `bound` cover all layers: each takes as much as it may."""
    start, num_layers = 0, len(sums) - 1
    for num_left in reversed(range(num_parts)):
        stop = start
        while stop < num_layers - num_left and sums[stop + 1] - sums[start] <= bound:
            stop += 1
        if stop == start:
            return False
        start = stop
    return start == num_layers


def _smoothest(sums: Sequence[float], num_parts: int, bound: float) -> list[int]:
    """The cuts with the smallest sum of squares among parts of at most `bound`, by dynamic programming."""
    num_layers = len(sums) - 1
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # by part: end -> (sum of squares, start)
    for part in range(1, num_parts + 1):
        found: dict[int, tuple[float, int]] = {}
        for start, (squares, _) in best[-1].items():
            for stop in range(start + 1, num_layers - (num_parts - part) + 1):
                weight = sums[stop] - sums[start]
                if weight > bound:
                    break
                if stop not in found or (squares + weight**2, -start) < (found[stop][0], -found[stop][1]):
                    found[stop] = (squares + weight**2, start)
        best.append(found)
    cuts = [num_layers]
    for found in reversed(best[1:]):
        cuts.append(found[cuts[-1]][1])
    return cuts[::-1]


def type_weights(method: str, names: Sequence[str]) -> list[int]:
    """1 for every layer whose class name matches the expression of "type:REGEX", upper and lower case alike."""
    pattern = method.partition(":")[2]
    try:
        matcher = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method: found {method!r}, whose expression is wrong: {error}") from error
    return [int(matcher.search(name) is not None) for name in names]


def check_method(method: str) -> str:
    """The method in lower case, where it is a name.

    Raises:
        ConfigError: there is no such method.
    """
    known = method.lower() if isinstance(method, str) else ""
    if known.startswith("type:"):
        return method
    if known not in METHODS:
        raise ConfigError(f"partition_method: found {method!r}; use one of {', '.join(METHODS)}")
    return known
