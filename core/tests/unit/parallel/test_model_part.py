"""A part of a whole parameter: what is taken of it, put back, and marked."""

import json

import pytest
import torch
from deepspeed.parallel.model_part import ModelPart, mark_part, part_held, parts_held


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_all_ranks_make_up_the_whole(dim):
    whole = torch.arange(60.0).view(6, 10)
    parts = [
        ModelPart(whole.shape, dim, ((0, 1), (3, 5))),
        ModelPart(whole.shape, dim, ((1, 3), (5, whole.shape[dim]))),
    ]
    again = torch.full_like(whole, -1.0)
    for part in parts:
        own = part.take(whole)
        assert own.shape == part.own_shape
        part.put(own, again)
    assert torch.equal(again, whole)


def test_a_mark_is_found_by_name_and_counts_as_tensor_parallel():
    linear = torch.nn.Linear(4, 3)
    part = ModelPart(torch.Size([6, 4]), 0, ((3, 6),))
    mark_part(linear.weight, part)
    assert part_held(linear.weight) is part
    assert part_held(linear.bias) is None
    assert parts_held(linear) == {"weight": part}
    assert linear.weight.tensor_model_parallel


def test_a_whole_parameter_under_another_name_is_not_tensor_parallel():
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    mark_part(weight, ModelPart(weight.shape, 0, ((0, 3),), name="experts.5.weight"))
    assert part_held(weight).is_whole
    assert not hasattr(weight, "tensor_model_parallel")


def test_a_mark_of_another_shape_is_a_mistake_of_the_layer():
    with pytest.raises(AssertionError):
        mark_part(torch.nn.Parameter(torch.zeros(3, 4)), ModelPart(torch.Size([6, 4]), 0, ((0, 2),)))


def test_a_part_as_plain_values():
    part = ModelPart(torch.Size([6, 4]), 1, ((0, 1), (2, 4)), name="expert.weight")
    assert ModelPart.of_plain(json.loads(json.dumps(part.to_plain()))) == part
    with pytest.raises(ValueError, match="ranges"):
        ModelPart.of_plain({**part.to_plain(), "ranges": [[3, 9]]})
