"""What a model file says of the division of its model: read back, and refused where it is none."""

from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint.deepspeed_files import with_division
from deepspeed.checkpoint.model_ranks import DIVISION, Division, SavedExperts
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import ModelPart

PART = ModelPart(torch.Size([6, 4]), 0, ((0, 2), (4, 6)), "whole.weight")


def division():
    return Division({"pp": 2, "tp": 2}, {"weight": PART}, {"ep_size_2": SavedExperts((0, 2), ("expert.weight",))})


def test_a_division_is_read_as_it_was_written():
    assert Division.of_file({DIVISION: division().to_state()}, "file") == division()


@pytest.mark.parametrize(
    "change",
    [
        {"axes": {"pp": 0, "tp": 0}},
        {"axes": {"pp": 2, "tp": -1}},
        {"axes": {"pp": 2}},
        {"axes": {"pp": 2, "tp": 2, "dp": 2}},
        {"axes": "pp"},
        {"parts": {"weight": {**PART.to_plain(), "ranges": [[4, 9]]}}},
        {"parts": {"weight": {**PART.to_plain(), "ranges": [[-1, 2]]}}},
        {"parts": {"weight": {**PART.to_plain(), "ranges": [[0, 3], [2, 4]]}}},
        {"parts": {"weight": {**PART.to_plain(), "shape": [-6, 4]}}},
        {"parts": {"weight": {**PART.to_plain(), "dim": 2}}},
        {"parts": {"weight": {**PART.to_plain(), "dim": -1}}},
        {"parts": {"weight": [6, 4]}},
        {"experts": {"ep_size_2": [[], ["expert.weight"]]}},
        {"experts": {"ep_size_2": [[-1], ["expert.weight"]]}},
        {"experts": {"ep_size_2": 3}},
    ],
)
def test_what_is_no_division_is_named(change):
    state = {**division().to_state(), **change}
    with pytest.raises(CheckpointError, match="file is damaged: ds_model_parallel is no description"):
        Division.of_file({DIVISION: state}, "file")


def division_said(info, **shapes):
    """Of the second of two tensor-parallel ranks, each of which has `shapes`."""
    state = {"mp_world_size": 2, "module": {}, "param_shapes": [shapes], "universal_checkpoint_info": info}
    return Division.of_file(with_division(state, Path("mp_rank_01_model_states.pt")), "file")


@pytest.mark.parametrize(
    ("info", "shape", "part"),
    [
        ({}, (4, 3), ModelPart(torch.Size([8, 3]), 0, ((4, 8),))),
        ({"parameter_with_row_parallelism_patterns": ["w"]}, (4, 3), ModelPart(torch.Size([4, 6]), 1, ((3, 6),))),
        ({"parameter_with_row_parallelism_patterns": [".w"]}, (4,), ModelPart(torch.Size([8]), 0, ((4, 8),))),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, (4, 3), ModelPart(torch.Size([8, 3]), 0, ((2, 4), (6, 8)))),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": ((8, 4), 3), "partition_dim": 0}]},
            (6, 3),
            ModelPart(torch.Size([12, 3]), 0, ((4, 8), (10, 12))),
        ),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": [3, 4, 5], "partition_dim": 1}]},
            (6, 5),
            ModelPart(torch.Size([12, 5]), 0, ((2, 4), (6, 8), (10, 12))),
        ),
        ({"tp_replicated_parameter_patterns": ["w"]}, (4, 3), None),
        ({"parameter_to_average_patterns": ["w"]}, (4, 3), None),
        ({}, (), None),
    ],
)
def test_patterns_of_names_say_what_a_rank_has(info, shape, part):
    found = division_said(info, w=shape)
    assert (found.axes, found.parts.get("w")) == ({"pp": 1, "tp": 2}, part)
    assert found.averaged == (("w",) if "parameter_to_average_patterns" in info else ())


@pytest.mark.parametrize(
    ("info", "shape", "told"),
    [
        ({"parameter_with_row_parallelism_patterns": ["w"]}, (4,), "w of shape .4,. matches .* has no dimension 1"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, (3, 3), "w of shape .3, 3. on each of 2"),
        ({"parameter_with_row_parallelism_patterns": ["("]}, (4, 3), "universal_checkpoint_info is of another form"),
        ({"parameter_with_sub_params": [{"patterns": ["w"]}]}, (4, 3), "universal_checkpoint_info is of another form"),
        (
            {"parameter_with_sub_params": [{"patterns": ["w"], "shape": [9, 3], "partition_dim": 0}]},
            (6, 3),
            "w has shape .6, 3. on one of 2 tensor-parallel ranks",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_named(info, shape, told):
    with pytest.raises(CheckpointError, match=told):
        division_said(info, w=shape)
