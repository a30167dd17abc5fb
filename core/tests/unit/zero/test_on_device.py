"""`deepspeed.OnDevice` constructs where and in what it is asked to, and leaves torch's defaults as they were."""

import deepspeed
import pytest
import torch


def test_a_model_without_memory():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.bfloat16)
    assert (torch.ones(1).device.type, torch.ones(1).dtype) == ("cpu", torch.float32)


def test_off():
    with deepspeed.utils.OnDevice(dtype=torch.bfloat16, enabled=False):
        layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)


def test_an_error_inside_restores_the_defaults():
    with pytest.raises(KeyError), deepspeed.OnDevice(dtype=torch.float16):
        raise KeyError("x")
    assert (torch.ones(1).device.type, torch.ones(1).dtype) == ("cpu", torch.float32)
