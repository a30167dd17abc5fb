"""The tensors that are found in what a forward returns."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.parallel.running import tensors_in


@dataclass
class Output:
    loss: torch.Tensor
    hidden: Any = None


def test_tensors_are_found_in_any_nesting():
    a, b, c, d = (torch.tensor(float(number)) for number in range(4))
    outputs = OrderedDict(first=(a, [b, "text"]), second=Output(c, {"deep": Output(d, None)}), third=None)
    assert all(each is wanted for each, wanted in zip(tensors_in(outputs), (a, b, c, d), strict=True))


def test_a_wrapped_tensor_is_found_with_what_it_wraps():
    found = []

    def loss(x):
        found.extend(tensors_in([x]))
        return x.sum()

    weight = torch.ones(2)
    torch.func.grad(loss)(weight)
    assert len(found) == 2
    assert torch.equal(found[1], weight)
