"""Sizes of the mesh and who stands in one line: pure integers."""

import pytest
from deepspeed.errors import ConfigError
from deepspeed.parallel.mesh import AXES, MeshSizes, rank_lines, read_sizes


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        (None, MeshSizes(dp=8)),
        ((4, 2), MeshSizes(dp=4, sp=2)),
        ({"dp": 2, "tp": 4}, MeshSizes(dp=2, tp=4)),
        ({"sequence_parallel": 2}, MeshSizes(dp=4, sp=2)),
        ({"pp": 2, "tp": 2}, MeshSizes(dp=2, pp=2, tp=2)),
        (MeshSizes(dp=8), MeshSizes(dp=8)),
    ],
)
def test_what_users_give(param, expected):
    assert read_sizes(param, 8) == expected


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
        read_sizes(param, 8)


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("sp", "dp"), ("pp", "tp"), AXES])
def test_lines_cover_the_world_once(axes):
    sizes = MeshSizes(dp=3, sp=2, tp=2, pp=2)
    lines = rank_lines(sizes, axes)
    expected = 1
    for axis in axes:
        expected *= sizes.of(axis)
    assert {len(line) for line in lines} == {expected}
    assert sorted(rank for line in lines for rank in line) == list(range(24))
    assert all(line == sorted(line) for line in lines)


def test_neighbours_share_a_model_and_data_parallel_ranks_are_strided():
    sizes = MeshSizes(dp=2, tp=2)
    assert rank_lines(sizes, ("tp",)) == [[0, 1], [2, 3]]
    assert rank_lines(sizes, ("dp",)) == [[0, 2], [1, 3]]
