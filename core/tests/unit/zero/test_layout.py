"""Who owns which elements: properties over arbitrary units and numbers of ranks."""

import pytest
from deepspeed.zero.layout import UnitLayout, divide_into_units, even_cuts, parameter_cuts
from hypothesis import given
from hypothesis import strategies as st

NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
WORLD = st.integers(1, 5)


def layout_of(numels, world_size, kind, max_fragment_numel=None):
    if kind == "whole":
        return UnitLayout.whole(numels, world_size)
    if kind == "single":
        return UnitLayout.single(numels, max_fragment_numel)
    return UnitLayout.even(numels, world_size, max_fragment_numel)


KINDS = st.sampled_from(["even", "whole", "single"])
LAYOUTS = st.builds(layout_of, NUMELS, WORLD, KINDS, st.none() | st.integers(1, 30))


@given(LAYOUTS)
def test_fragments_and_gaps_cover_the_buffer_once(layout):
    stretches = [(fragment.start, fragment.stop) for fragment in layout.fragments] + [*layout.gaps]
    assert sorted(place for stretch in stretches for place in range(*stretch)) == list(range(layout.padded_numel))
    assert sum(stop - start for start, stop in layout.gaps) == layout.padded_numel - layout.numel


@given(LAYOUTS)
def test_fragments_cover_every_element_of_every_parameter_once(layout):
    for param, numel in enumerate(layout.numels):
        own = [fragment for fragment in layout.fragments if fragment.param == param]
        covered = [fragment.param_start + place for fragment in own for place in range(fragment.numel)]
        assert covered == list(range(numel))
        assert all(fragment.start == layout.offsets[param] + fragment.param_start for fragment in own)


@given(LAYOUTS)
def test_shards_are_equal_and_own_the_fragments_in_them(layout):
    shards = [layout.shard(rank) for rank in range(layout.world_size)]
    assert [stop - start for start, stop in shards] == [layout.shard_numel] * layout.world_size
    assert (shards[0][0], shards[-1][1]) == (0, layout.padded_numel)
    for fragment in layout.fragments:
        start, stop = shards[fragment.owner]
        assert start <= fragment.start < fragment.stop <= stop
    assert [f for rank in range(layout.world_size) for f in layout.owned_by(rank)] == list(layout.fragments)


@given(LAYOUTS)
def test_a_shard_is_fragments_and_then_padding(layout):
    for rank in range(layout.world_size):
        start, stop = layout.shard(rank)
        owned = [place for fragment in layout.owned_by(rank) for place in range(fragment.start, fragment.stop)]
        assert owned == list(range(start, stop - layout.padding(rank)))


@given(LAYOUTS)
def test_what_a_rank_owns_of_a_parameter_is_its_fragments(layout):
    for param in range(len(layout.numels)):
        for rank in range(layout.world_size):
            owned = [each for each in layout.owned_by(rank) if each.param == param]
            start, stop = layout.fragment_of(param, rank)
            assert stop - start == sum(each.numel for each in owned)
            assert not owned or (start, stop) == (owned[0].start, owned[-1].stop)


@given(NUMELS, WORLD)
def test_even_shards_have_no_gaps_but_at_the_end(numels, world_size):
    layout = UnitLayout.even(numels, world_size)
    assert layout.padded_numel == even_cuts(numels, world_size)[-1]
    assert layout.shard_numel % 2 == 0
    assert layout.gaps in ((), ((sum(numels), layout.padded_numel),))
    assert layout.padded_numel - sum(numels) < 2 * world_size


@given(NUMELS, WORLD, st.integers(1, 30))
def test_long_fragments_are_divided_on_request(numels, world_size, max_numel):
    whole, divided = (UnitLayout.even(numels, world_size, limit) for limit in (None, max_numel))
    assert max(fragment.numel for fragment in divided.fragments) <= max_numel
    at_most = sum(-(-fragment.numel // max_numel) for fragment in whole.fragments)
    assert len(divided.fragments) == at_most, "no more fragments than needed"
    assert (divided.offsets, divided.shard_numel) == (whole.offsets, whole.shard_numel)


@given(NUMELS, WORLD)
def test_whole_shards_divide_no_parameter(numels, world_size):
    layout = UnitLayout.whole(numels, world_size)
    assert [fragment.numel for fragment in layout.fragments] == list(numels)
    owners = [fragment.owner for fragment in layout.fragments]
    assert owners == sorted(owners), "each shard holds a run of the parameters"
    assert min(layout.padding(rank) for rank in range(world_size)) == 0, "no longer than the longest run"


@given(NUMELS, st.none() | st.integers(1, 30))
def test_a_single_owner_has_everything_and_no_padding(numels, max_numel):
    layout = UnitLayout.single(numels, max_numel)
    assert (layout.padded_numel, layout.gaps) == (sum(numels), ())
    assert {fragment.owner for fragment in layout.fragments} == {0}


@given(st.lists(st.integers(0, 1000), max_size=5), st.integers(1, 9))
def test_even_cuts_are_even_and_padded_to_twice_the_ranks(numels, world_size):
    cuts, numel = even_cuts(numels, world_size), sum(numels)
    sizes = {stop - start for start, stop in zip(cuts, cuts[1:])}
    assert (cuts[0], len(cuts), len(sizes)) == (0, world_size + 1, 1)
    assert cuts[-1] % (2 * world_size) == 0
    assert 0 <= cuts[-1] - numel < 2 * world_size


@given(NUMELS, WORLD)
def test_parameter_cuts_leave_every_parameter_whole(numels, world_size):
    cuts = parameter_cuts(numels, world_size)
    boundaries = {sum(numels[:count]) for count in range(len(numels) + 1)}
    assert (cuts[0], cuts[-1], len(cuts)) == (0, sum(numels), world_size + 1)
    assert list(cuts) == sorted(cuts)
    assert set(cuts) <= boundaries
    assert all(stop - start <= sum(numels) / world_size + max(numels) for start, stop in zip(cuts, cuts[1:]))


def fragments_of(layout):
    return [(each.param, each.param_start, each.start, each.stop, each.owner) for each in layout.fragments]


def test_even_shards_written_out():
    layout = UnitLayout.even([3, 2], 2)
    assert (layout.shard_numel, layout.padded_numel, layout.numel) == (4, 8, 5)
    assert fragments_of(layout) == [(0, 0, 0, 3, 0), (1, 0, 3, 4, 0), (1, 1, 4, 5, 1)]
    assert [layout.padding(rank) for rank in (0, 1)] == [0, 3]
    assert layout.gaps == ((5, 8),)


def test_whole_shards_written_out():
    layout = UnitLayout.whole([10, 1, 1], 3)
    assert parameter_cuts([10, 1, 1], 3) == (0, 0, 10, 12)
    assert fragments_of(layout) == [(0, 0, 10, 20, 1), (1, 0, 20, 21, 2), (2, 0, 21, 22, 2)]
    assert [layout.padding(rank) for rank in range(3)] == [10, 0, 8], "a rank may own nothing"
    assert layout.gaps == ((0, 10), (22, 30))


# ---- units ------------------------------------------------------------------------------------------------------


@st.composite
def placed(draw):
    numels = draw(NUMELS)
    return numels, draw(st.permutations(range(len(numels))))


@given(placed(), st.integers(1, 60))
def test_every_parameter_is_in_one_unit_of_bounded_size(params, max_numel):
    numels, positions = params
    runs = divide_into_units(numels, positions, max_numel)
    assert sorted(index for run in runs for index in run) == list(range(len(numels)))
    assert all(len(run) == 1 or sum(numels[index] for index in run) <= max_numel for run in runs)
    assert all(run for run in runs)


@given(placed(), st.integers(1, 60))
def test_units_come_in_the_order_in_which_a_backward_fills_them(params, max_numel):
    numels, positions = params
    runs = divide_into_units(numels, positions, max_numel)
    visited = [positions[index] for run in runs for index in run[::-1]]
    assert visited == sorted(positions, reverse=True)


@pytest.mark.parametrize(
    ("max_numel", "runs"),
    [(5, [[3], [2], [0, 1]]), (100, [[0, 1, 2, 3]]), (7, [[2, 3], [0, 1]]), (1, [[3], [2], [1], [0]])],
)
def test_units_written_out(max_numel, runs):
    assert divide_into_units([2, 2, 4, 3], range(4), max_numel) == runs
