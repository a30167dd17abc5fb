"""What a model file says of the division of its model: read back, and refused where it is none."""

import pytest
import torch
from deepspeed.checkpoint.model_ranks import DIVISION, Division, Experts
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import ModelPart

PART = ModelPart(torch.Size([6, 4]), 0, ((0, 2), (4, 6)), "whole.weight")


def division():
    return Division({"pp": 2, "tp": 2}, {"weight": PART}, {"ep_size_2": Experts((0, 2), ("expert.weight",))})


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
