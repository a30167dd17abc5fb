"""Two tiers of tests: what every run needs, and the corners that `pytest -m ''` adds (the marker `sweep`)."""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest


def swept(cases: Iterable[Any], kept: Callable[..., bool]) -> list[Any]:
    """`cases` as arguments of `parametrize`, marked `sweep` unless `kept` says that every run needs them.

        @pytest.mark.parametrize(("stage", "clip"), swept(product((0, 1, 2), (0.0, 0.1)), lambda s, c: s == 2 or not c))

    Args:
        cases: values of one argument, or tuples of several.
        kept: called with the values of a case; keeps at least one case, and each value of an argument in some case.
    """
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=() if kept(*values) else pytest.mark.sweep))
    assert not all(param.marks for param in params), "every run needs one of the cases"
    return params


def covering(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of `cases` in which any two values of two arguments meet that meet in some case; the same ones every time."""
    pairs = [(case, set(combinations(enumerate(map(str, case)), 2))) for case in cases]
    missing = set().union(*(its_pairs for _, its_pairs in pairs))
    chosen = []
    while missing:
        case, met = max(pairs, key=lambda pair: len(pair[1] & missing))
        chosen.append(case)
        missing -= met
    return chosen
