"""Two tiers of tests: those of every run, and the corner cases that `pytest -m ''` adds (the marker `sweep`)."""

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest


def swept(cases: Iterable[Any], kept: Callable[..., bool]) -> list[Any]:
    """Return `cases` as arguments of `parametrize`, with the marker `sweep` on the cases that `kept` rejects.

        @pytest.mark.parametrize(("stage", "clip"), swept(product((0, 1, 2), (0.0, 0.1)), lambda s, c: s == 2 or not c))

    Args:
        cases: values of one argument, or tuples of several.
        kept: called with the values of a case; must keep at least one case, and each value of an argument in some case.
    """
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=() if kept(*values) else pytest.mark.sweep))
    assert not all(param.marks for param in params), "every run needs one of the cases"
    return params


def covering(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return few of `cases` that contain every pair of two arguments' values in `cases`. The choice is reproducible."""
    pairs = [(case, set(combinations(enumerate(map(str, case)), 2))) for case in cases]
    missing = set().union(*(its_pairs for _, its_pairs in pairs))
    chosen = []
    while missing:
        case, met = max(pairs, key=lambda pair: len(pair[1] & missing))
        chosen.append(case)
        missing -= met
    return chosen


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Mark as `sweep` the cases that `covering` leaves out, for each test with several `parametrize`.

    The values of one `parametrize` count as one argument, so that no row of a table is left out. Call this in
    `pytest_collection_modifyitems` for tests whose cases make the same checks on other values, like kernel tests. The
    hook must be the first (`tryfirst`), because pytest selects by markers in the same hook.
    """
    grids: dict[tuple[str, str], list[tuple[tuple[str, ...], pytest.Item]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("sweep"):
            grids.setdefault((str(item.path), item.originalname), []).append((_case(item), item))
    for cases in grids.values():
        kept = set(covering([case for case, _ in cases]))
        for case, item in cases:
            if len(case) > 1 and case not in kept:
                item.add_marker(pytest.mark.sweep)


def _case(item: pytest.Function) -> tuple[str, ...]:
    """Return the values of a test's parameters, as one text for each `parametrize`."""
    stated = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in stated]
    params = item.callspec.params
    alone = sorted(set(params) - {name for names in together for name in names})
    return tuple(str([params.get(name) for name in names]) for names in (*together, *([name] for name in alone)))
