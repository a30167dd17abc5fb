"""Who owns which slice: properties over arbitrary groups and numbers of ranks."""

import pytest
from deepspeed.zero.layout import GroupLayout, cut_buckets, even_cuts, parameter_cuts, update_batches
from hypothesis import given
from hypothesis import strategies as st

NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
WORLD = st.integers(1, 5)
CUTTERS = st.sampled_from(["even", "parameter"])


def layout_of(numels, world_size, cutter, max_fragment_numel=None):
    cuts = even_cuts(numels, world_size) if cutter == "even" else parameter_cuts(numels, world_size)
    return GroupLayout(numels, cuts, max_fragment_numel)


LAYOUTS = st.builds(layout_of, NUMELS, WORLD, CUTTERS, st.none() | st.integers(1, 30))


@given(LAYOUTS)
def test_fragments_cover_every_element_once(layout):
    covered = [place for fragment in layout.fragments for place in range(fragment.start, fragment.stop)]
    assert covered == list(range(layout.numel))
    for fragment in layout.fragments:
        assert fragment.start == layout.offsets[fragment.param] + fragment.param_start
        assert 0 < fragment.numel <= layout.numels[fragment.param] - fragment.param_start


@given(LAYOUTS)
def test_owners_match_the_cuts(layout):
    for fragment in layout.fragments:
        start, stop = layout.partition(fragment.owner)
        assert start <= fragment.start < fragment.stop <= stop
    world_size = len(layout.cuts) - 1
    assert [f for rank in range(world_size) for f in layout.owned_by(rank)] == list(layout.fragments)


@given(LAYOUTS)
def test_partitions_are_fragments_and_padding(layout):
    for rank in range(len(layout.cuts) - 1):
        start, stop = layout.partition(rank)
        assert sum(f.numel for f in layout.owned_by(rank)) + layout.padding(rank) == stop - start


@given(st.lists(st.integers(0, 1000), max_size=5), st.integers(1, 9))
def test_even_cuts_are_even_and_padded_to_twice_the_ranks(numels, world_size):
    cuts, numel = even_cuts(numels, world_size), sum(numels)
    sizes = {stop - start for start, stop in zip(cuts, cuts[1:])}
    assert (cuts[0], len(cuts), len(sizes)) == (0, world_size + 1, 1)
    assert cuts[-1] % (2 * world_size) == 0
    assert 0 <= cuts[-1] - numel < 2 * world_size


@given(NUMELS, WORLD, st.integers(1, 30))
def test_long_fragments_are_divided_on_request(numels, world_size, max_numel):
    whole, divided = (layout_of(numels, world_size, "even", limit) for limit in (None, max_numel))
    assert max(fragment.numel for fragment in divided.fragments) <= max_numel
    at_most = sum(-(-fragment.numel // max_numel) for fragment in whole.fragments)
    assert len(divided.fragments) == at_most, "no more pieces than needed"
    assert divided.cuts == whole.cuts


@given(NUMELS, WORLD)
def test_parameter_cuts_leave_every_parameter_whole(numels, world_size):
    cuts = parameter_cuts(numels, world_size)
    layout = GroupLayout(numels, cuts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, sum(numels), world_size + 1)
    assert list(cuts) == sorted(cuts)
    assert [f.numel for f in layout.fragments] == list(numels)
    largest = max(numels)
    assert all(stop - start <= sum(numels) / world_size + largest for start, stop in zip(cuts, cuts[1:]))


def test_a_group_written_out():
    layout = GroupLayout([3, 2], even_cuts([3, 2], 2))
    assert layout.cuts == (0, 4, 8)
    assert [(f.param, f.param_start, f.start, f.stop, f.owner) for f in layout.fragments] == [
        (0, 0, 0, 3, 0),
        (1, 0, 3, 4, 0),
        (1, 1, 4, 5, 1),
    ]
    assert [layout.padding(rank) for rank in (0, 1)] == [0, 3]
    assert parameter_cuts([10, 1, 1], 3) == (0, 0, 10, 12)  # a rank may own nothing


# ---- buckets ----------------------------------------------------------------------------------------------------


@st.composite
def several_groups(draw):
    world_size = draw(WORLD)
    cutter = draw(CUTTERS)
    numels = draw(st.lists(NUMELS, min_size=1, max_size=3))
    places = draw(st.permutations(range(sum(len(group) for group in numels))))
    positions, taken = [], 0
    for group in numels:
        positions.append(list(places[taken : taken + len(group)]))
        taken += len(group)
    limit = draw(st.none() | st.integers(1, 30))
    return [layout_of(group, world_size, cutter, limit) for group in numels], positions


@given(several_groups(), st.integers(1, 60))
def test_every_fragment_is_in_one_bucket(groups, max_numel):
    layouts, positions = groups
    specs = cut_buckets(layouts, positions, max_numel)
    found = sorted((spec.group, fragment.start, fragment.stop) for spec in specs for fragment in spec.fragments)
    assert found == [(group, f.start, f.stop) for group, layout in enumerate(layouts) for f in layout.fragments]


@given(several_groups(), st.integers(1, 60))
def test_a_bucket_is_a_run_with_one_owner_and_bounded(groups, max_numel):
    layouts, positions = groups
    for spec in cut_buckets(layouts, positions, max_numel):
        assert {fragment.owner for fragment in spec.fragments} == {spec.owner}
        assert (spec.fragments[0].start, spec.fragments[-1].stop) == (spec.start, spec.stop)
        for before, after in zip(spec.fragments, spec.fragments[1:]):
            assert before.stop == after.start
        assert spec.numel <= max_numel or len(spec.fragments) == 1


@given(several_groups(), st.integers(1, 60))
def test_buckets_are_in_the_order_in_which_a_backward_fills_them(groups, max_numel):
    layouts, positions = groups
    specs = cut_buckets(layouts, positions, max_numel)
    filled_at = [min(positions[spec.group][fragment.param] for fragment in spec.fragments) for spec in specs]
    assert filled_at == sorted(filled_at, reverse=True)
    assert specs == cut_buckets(layouts, positions, max_numel)


# ---- batches of the update --------------------------------------------------------------------------------------


@given(LAYOUTS, st.integers(1, 60))
def test_update_batches_line_up_on_all_ranks(layout, max_numel):
    batches = update_batches(layout, max_numel)
    world_size = len(layout.cuts) - 1
    assert all(len(batch) == world_size for batch in batches)
    for rank in range(world_size):
        mine = [batch[rank] for batch in batches]
        assert [fragment for fragments in mine for fragment in fragments] == layout.owned_by(rank)
        assert all(
            len(fragments) == 1 or sum(f.numel for f in fragments) <= max_numel for fragments in mine if fragments
        )
    assert all(any(batch) for batch in batches)


@pytest.mark.parametrize(
    ("max_numel", "sizes"), [(5, [[2, 2], [4], [3]]), (100, [[2, 2, 4, 3]]), (1, [[2], [2], [4], [3]])]
)
def test_update_batches_written_out(max_numel, sizes):
    layout = GroupLayout([2, 2, 4, 3], (0, 11))
    assert [[f.numel for f in batch[0]] for batch in update_batches(layout, max_numel)] == sizes
