"""Grids of ranks: DeepSpeed's topologies, and the layout of a mesh that they give."""

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    layout_of,
    topology_of,
)


def test_the_last_axis_varies_fastest():
    topology = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert [topology.get_rank(row=row, col=col) for row in range(2) for col in range(3)] == list(range(6))
    assert topology.get_coord(4) == (1, 1)
    assert topology.world_size() == 6
    assert topology.get_axis_names() == ["row", "col"]
    assert (topology.get_dim("col"), topology.get_dim("depth")) == (3, 0)


def test_lines_along_an_axis():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("depth") == []


def test_ranks_that_match():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("model", 1) == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("omit", "text"), [(["data", "pipe"], "model_01"), (["pipe"], "data_00-model_01"), (["pipe", "data", "model"], "")]
)
def test_a_place_as_text(omit, text):
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(rank=5, omit_axes=omit) == text


def test_wrong_places_are_refused():
    topology = PipeDataParallelTopology(2, 3)
    with pytest.raises(ValueError, match=r"one along each of \['pipe', 'data'\]"):
        topology.get_rank(pipe=0)
    with pytest.raises(ValueError, match="'pipe': 2, 'data': 3"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="ranks 0 to 5"):
        topology.get_coord(6)
    with pytest.raises(ValueError, match="depth"):
        topology.filter_match(depth=0)
    with pytest.raises(ConfigError, match=r"sizes \[2\]"):
        ProcessTopology(["a", "b"], [2])


def test_what_is_no_topology(single_rank):
    with pytest.raises(ConfigError, match="PipelineModule: topology is int; give a ProcessTopology, such as PipeData"):
        deepspeed.PipelineModule(layers=[torch.nn.ReLU()], topology=2)


def test_the_layout_has_every_rank_where_the_topology_has_it():
    usual = layout_of(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3))
    assert (usual.size("pp"), usual.size("dp"), usual.size("tp")) == (2, 3, 2)
    assert usual.ranks == tuple(range(12))
    other = ProcessTopology(["data", "pipe"], [2, 2])
    assert (
        [list(line) for line in layout_of(other).lines("pp")] == other.get_axis_comm_lists("pipe") == [[0, 1], [2, 3]]
    )
    with pytest.raises(ConfigError, match="depth"):
        layout_of(ProcessTopology(["depth"], [2]))


def test_a_layout_as_a_topology():
    for topology in (PipeDataParallelTopology(2, 3), PipeModelDataParallelTopology(2, 2, 2)):
        assert topology_of(layout_of(topology)).mapping == topology.mapping
