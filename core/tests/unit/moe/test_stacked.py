"""Stacked experts against the same experts one by one, by grouped matrix products and by a loop over slices."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.moe.experts import ExpertMLP, Experts, StackedExperts, grouped_linear, hold_experts
from deepspeed.moe.layer import MoE
from torch import nn

COUNTS = [3, 0, 5, 1]


def pair(gated, width=8, inner=16):
    torch.manual_seed(0)
    experts = [ExpertMLP(width, inner, "silu", gated=gated) for _ in COUNTS]
    return StackedExperts(experts), Experts(experts)


@pytest.fixture(params=[True, False], ids=["grouped", "loop"])
def has_grouped_mm(request, monkeypatch):
    accelerator = get_accelerator()
    if not request.param:
        monkeypatch.setattr(accelerator, "is_grouped_mm_supported", lambda: False)
    elif not accelerator.is_grouped_mm_supported():
        pytest.skip("this torch has no grouped matrix product for the CPU")
    return request.param


def test_torch_is_asked_for_grouped_products(monkeypatch, has_grouped_mm):
    num_calls = []
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **keys: num_calls.append(1) or torch.empty(9, 8))
    grouped_linear(torch.randn(9, 8), torch.randn(4, 8, 8), COUNTS)
    assert len(num_calls) == has_grouped_mm


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [8, 5])  # 5: rows that begin anywhere
def test_numbers_are_those_of_single_experts(gated, width, has_grouped_mm):
    together, single = pair(gated, width, 3 * width)
    rows = torch.randn(sum(COUNTS), width)
    outputs, row_grads = [], []
    for experts in (together, single):
        own = rows.clone().requires_grad_()
        output = experts(own, COUNTS)
        output.sum().backward()  # an expanded gradient
        outputs.append(output.detach())
        row_grads.append(own.grad)
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(row_grads[0], row_grads[1])
    for name, param in together.named_parameters():
        expected = torch.stack([getattr(expert, name).weight.grad for expert in single.deepspeed_experts])
        torch.testing.assert_close(param.grad, expected)


def test_no_rows(has_grouped_mm):
    experts, _ = pair(True)
    output = experts(torch.empty(0, 8, requires_grad=True), [0, 0, 0, 0])
    output.sum().backward()
    assert output.shape == (0, 8)
    assert all((param.grad == 0).all() for param in experts.parameters())


def test_autocast(has_grouped_mm):
    experts, single = pair(True)
    rows = torch.randn(sum(COUNTS), 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = experts(rows, COUNTS), single(rows, COUNTS)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_only_experts_of_this_class_are_stacked():
    class Mine(ExpertMLP):
        pass

    assert isinstance(hold_experts([ExpertMLP(4, 4)], 1), StackedExperts)
    assert isinstance(hold_experts([Mine(4, 4)], 1), Experts)
    assert isinstance(MoE(4, nn.Linear(4, 4)).deepspeed_moe.experts, Experts)


def test_an_unknown_activation():
    with pytest.raises(ConfigError, match="found activation 'tanh'; give one of gelu, relu, silu"):
        ExpertMLP(4, 4, "tanh")
