"""The grid of ranks: pure integers."""

import math

import pytest
from deepspeed.errors import ConfigError
from deepspeed.parallel.layout import AXES, grid, read_layout
from hypothesis import assume, given
from hypothesis import strategies as st

small = st.integers(1, 3)


@st.composite
def layouts(draw):
    """Any grid, over any ranks of a larger world, in any order."""
    sizes = {axis: draw(small) for axis in ("sp", "tp", "pp")}
    shard = draw(small)
    sizes["dp"] = shard * draw(small)
    count = math.prod(sizes.values())
    ranks = draw(st.permutations(range(count)))
    return grid(**sizes, shard=shard, ranks=tuple(2 * rank for rank in ranks))


@given(layout=layouts(), axes=st.sets(st.sampled_from(AXES)))
def test_every_rank_is_in_one_line_of_any_axes(layout, axes):
    lines = layout.lines(*axes)
    assert sorted(rank for line in lines for rank in line) == sorted(layout.ranks)
    assert {len(line) for line in lines} == {layout.size(*axes)}
    assert all(line == tuple(sorted(line)) for line in lines)
    assert all(layout.line(rank, *axes) in lines for rank in layout.ranks)


@given(layout=layouts(), one=st.sampled_from(AXES), other=st.sampled_from(AXES))
def test_lines_of_two_axes_cross_in_one_rank(layout, one, other):
    assume(one != other)
    for rank in layout.ranks:
        assert set(layout.line(rank, one)) & set(layout.line(rank, other)) == {rank}
        assert set(layout.line(rank, one)) <= set(layout.line(rank, one, other))


def test_neighbors_share_a_model_and_data_parallel_ranks_are_strided():
    layout = grid(dp=2, tp=2)
    assert layout.lines("tp") == ((0, 1), (2, 3))
    assert layout.lines("dp") == ((0, 2), (1, 3))


def test_the_axes_from_outermost():
    layout = grid(pp=2, dp=4, shard=2, sp=2, tp=2)
    assert layout.axes == AXES
    strides = {axis: layout.line(0, axis)[1] for axis in AXES}
    assert strides == {"pp": 16, "dp_replicate": 8, "dp_shard": 4, "sp": 2, "tp": 1}
    assert layout.line(0, "dp") == (0, 4, 8, 12)


def test_an_unknown_axis():
    with pytest.raises(ValueError, match="asked for the axis ep; it has pp, dp_replicate, dp_shard, sp, tp"):
        grid(dp=2).lines("ep")


# ---- shards and copies ---------------------------------------------------------------------------------------------


def test_copies_are_of_neighbors():
    layout = grid(dp=4, tp=2).split_data(2, "mics_shard_size")
    assert layout.lines("dp_shard", "sp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.lines("dp_replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.lines("dp") == grid(dp=4, tp=2).lines("dp")


def test_the_ranks_of_a_sequence_hold_shards_of_one_copy():
    layout = grid(dp=2, sp=2).split_data(2, "mics_shard_size")
    assert layout.lines("dp_shard", "sp") == ((0, 1), (2, 3))
    assert layout.size("dp_shard") == 1


@pytest.mark.parametrize(
    ("sp", "size", "allowed"), [(1, 3, "1, 2 or 4"), (2, 3, "2, 4 or 8"), (2, 1, "2, 4 or 8"), (1, 8, "1, 2 or 4")]
)
def test_copies_that_do_not_fit(sp, size, allowed):
    with pytest.raises(ConfigError, match=rf"mics_shard_size: found {size}, .* groups of {allowed}; give one of these"):
        grid(dp=4, sp=sp).split_data(size, "zero_optimization.mics_shard_size")


# ---- experts -------------------------------------------------------------------------------------------------------


def test_expert_groups_as_documented():
    """The example of DeepSpeed's documentation: 16 ranks, 2 per model, experts over 4."""
    layout = grid(dp=8, tp=2).experts(4)
    assert set(layout.lines("ep")) == {(0, 2, 4, 6), (8, 10, 12, 14), (1, 3, 5, 7), (9, 11, 13, 15)}
    assert set(layout.lines("edp")) == {(rank, rank + 8) for rank in range(8)}


def test_data_before_experts():
    layout = grid(dp=4).experts(2, data_before_expert=True)
    assert layout.lines("ep") == ((0, 2), (1, 3))
    assert layout.lines("edp") == ((0, 1), (2, 3))


@given(layout=layouts(), divisor=small)
def test_experts_lay_the_same_ranks_out_again(layout, divisor):
    assume(layout.size("dp", "sp") % divisor == 0)
    experts = layout.experts(divisor)
    assert set(experts.lines("edp", "ep")) == set(layout.lines("dp", "sp"))
    assert experts.lines("tp") == layout.lines("tp")
    assert experts.lines("pp") == layout.lines("pp")


@pytest.mark.parametrize("size", [0, 3, 8])
def test_experts_that_do_not_divide_the_ranks(size):
    with pytest.raises(ConfigError, match=f"expert parallel size: found {size}, but dp x sp has 4 ranks"):
        grid(dp=2, sp=2, tp=2).experts(size)


# ---- what users give -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        (None, grid(dp=8)),
        ((4, 2), grid(dp=4, sp=2)),
        ({"dp": 2, "tp": 4}, grid(dp=2, tp=4)),
        ({"sequence_parallel": 2}, grid(dp=4, sp=2)),
        ({"pp": 2, "tp": 2}, grid(dp=2, pp=2, tp=2)),
    ],
)
def test_what_users_give(param, expected):
    assert read_layout(param, 8) == expected


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ((4, 4), "pp 1 x dp 4 x sp 4 x tp 1 = 16, but the world has 8 ranks"),
        ({"sp": 3}, "= 6, but the world has 8"),
        ({"xp": 2}, "mesh_param.xp: no such axis"),
        ({"tp": 0}, "mesh_param.tp: expected a positive integer, found 0"),
        ({"tp": 2, "mp": 2}, "given twice"),
        ((2, 2, 2), r"found \(2, 2, 2\)"),
        ("dp", "found 'dp'"),
    ],
)
def test_what_is_refused(param, message):
    with pytest.raises(ConfigError, match=message):
        read_layout(param, 8)
