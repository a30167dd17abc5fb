"""What a run leaves to the sweep."""

from itertools import combinations, product

import pytest
from deepspeed.testing.tiers import covering, swept


def test_what_is_kept_runs_always_and_the_rest_in_the_sweep():
    params = swept([(0, "a"), (1, "b")], lambda number, _: number == 1)
    assert [(param.values, [mark.name for mark in param.marks]) for param in params] == [
        ((0, "a"), ["sweep"]),
        ((1, "b"), []),
    ]
    assert swept([2, 3], lambda world: world == 3)[1].values == (3,)


def test_something_is_kept():
    with pytest.raises(AssertionError, match="every run needs one of the cases"):
        swept([1, 2], lambda _: False)


def test_any_two_values_meet_where_they_can():
    cases = [case for case in product(range(3), "abc", (False, True), (0.0, 0.5)) if case[:2] != (1, "b")]
    chosen = covering(cases)
    assert len(chosen) <= 11
    for one, other in combinations(range(4), 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in cases}
    assert chosen == covering(cases)
