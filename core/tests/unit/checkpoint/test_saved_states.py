"""Reading states by range: where DeepSpeed's optimizers keep the step count, and how stage 3 cuts sub-groups."""

import pytest
import torch
from deepspeed.checkpoint.saved_states import DividedStates
from deepspeed.errors import CheckpointError


def part(stage, buffers, group, **state):
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    base = {"state": {index: {"exp_avg": buffer, **state} for index, buffer in enumerate(buffers)}}
    return {"zero_stage": stage, key: buffers, "base_optimizer_state": {**base, "param_groups": [group]}}


def test_the_step_of_a_group_is_that_of_its_parameters():
    """DeepSpeed's FusedAdam counts there."""
    states = DividedStates([part(2, [torch.ones(3)], {"lr": 1.0, "step": 7})], [{"w": torch.Size([3])}])
    assert states.scalars("w") == {"step": torch.tensor(7.0)}
    states = DividedStates([part(2, [torch.ones(3)], {"step": 7}, step=torch.tensor(4.0))], [{"w": torch.Size([3])}])
    assert states.scalars("w") == {"step": torch.tensor(4.0)}


SHAPES = {"a": torch.Size([3]), "b": torch.Size([2, 2]), "c": torch.Size([5])}


def test_sub_groups_of_stage_3():
    """Two ranks; `a` and `b` fill the first sub-group (2 + 2 elements per rank), `c` the second (3)."""
    parts = [
        part(3, [torch.tensor([0.0, 1.0, 3.0, 4.0]), torch.tensor([7.0, 8.0, 9.0])], {}),
        part(3, [torch.tensor([2.0, 99, 5.0, 6.0]), torch.tensor([10.0, 11.0, 99])], {}),
    ]
    states = DividedStates(parts, [SHAPES])
    assert states.master("a", 0, 3).tolist() == [0, 1, 2]
    assert states.master("b", 1, 3).tolist() == [4, 5, 6]
    assert states.elements("c", "exp_avg", 0, 5).tolist() == [7, 8, 9, 10, 11]


def test_sub_groups_that_do_not_fit_the_parameters():
    with pytest.raises(CheckpointError, match="2 buffers, with no room for c"):
        DividedStates([part(3, [torch.ones(3), torch.ones(4)], {})], [SHAPES])
