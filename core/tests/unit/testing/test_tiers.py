"""What a run leaves to the sweep."""

from itertools import combinations, product

import pytest
from deepspeed.testing.tiers import covering, swept, thin_out


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


GRIDS = """
import pytest

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", "xy")
@pytest.mark.parametrize("c", [0.0, 0.5])
def test_three(a, b, c):
    pass

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", "xy")
def test_two(a, b):
    pass

@pytest.mark.parametrize("a", range(4))
def test_one(a):
    pass

@pytest.mark.parametrize(("a", "b", "c"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1)])
def test_rows(a, b, c):
    pass

def test_none():
    pass
"""


def test_grids_of_three_arguments_and_more_are_thinned_out(tmp_path, request):
    (tmp_path / "test_grids.py").write_text(GRIDS)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "test_grids.py")
    items = list(request.session.genitems(module))
    thin_out(items)
    left = [item.originalname for item in items if item.get_closest_marker("sweep") is None]
    assert {name: left.count(name) for name in dict.fromkeys(left)} == {
        "test_three": 8,
        "test_two": 8,
        "test_one": 4,
        "test_rows": 5,
        "test_none": 1,
    }
