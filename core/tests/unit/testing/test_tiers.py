"""What a run leaves to the sweep."""

import pytest
from deepspeed.testing.tiers import swept


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
