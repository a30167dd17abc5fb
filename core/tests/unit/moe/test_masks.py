"""The functions of `deepspeed.moe.sharded_moe`: dispatch by their masks has the numbers of the layer."""

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.moe.gate import TopKGate
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

TOKENS, EXPERTS = 12, 4


def logits(num_tokens=TOKENS):
    return torch.randn(num_tokens, EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)


def gating(k, values, **arguments):
    if k == 1:
        return top1gating(values, 0.6, 1, use_rts=False, **arguments)
    if k == 2:
        return top2gating(values, 0.6, 1, top2_2nd_expert_sampling=False, **arguments)
    return topkgating(values, k, 0.6, 1, **arguments)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_masks_have_the_choices_and_weights_of_the_gate(k, drops):
    gate = TopKGate(
        1, EXPERTS, k, capacity_factor=0.6, min_capacity=1, drop_tokens=drops, use_rts=False,
        top2_2nd_expert_sampling=False,
    )  # fmt: skip
    values, expected_values = logits(), logits()
    loss, combine, dispatch, counts = gating(k, values, drop_tokens=drops)
    routing = gate.route(expected_values)
    weights = torch.zeros(TOKENS, EXPERTS).scatter_add(1, routing.experts, routing.weights)
    torch.testing.assert_close(combine.sum(2), weights)
    torch.testing.assert_close(loss, routing.loss)
    assert counts.tolist() == routing.counts.tolist()
    assert dispatch.shape == (TOKENS, EXPERTS, routing.capacity or int(counts.max()))
    assert dispatch.sum(0).max() == 1  # a place has one token
    assert dispatch.sum() == routing.kept.sum()
    assert bool(routing.kept.all()) is not drops
    power = torch.arange(EXPERTS, dtype=torch.float32)
    ((combine.sum(2) * power).sum() + loss).backward()
    ((weights * power).sum() + routing.loss).backward()
    torch.testing.assert_close(values.grad, expected_values.grad)


def test_unused_tokens_have_no_place():
    used = torch.ones(TOKENS)
    used[::2] = 0
    _, combine, dispatch, counts = top1gating(logits(), 4.0, 1, used_token=used)
    assert not dispatch[::2].any()
    assert combine[1::2].sum(dim=(1, 2)).gt(0).all()
    assert counts.sum() == TOKENS // 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topkgating(logits(), 2, 1.0, 1), "topkgating: found k 2; call top1gating or top2gating"),
        (lambda: topkgating(logits(), 3, 1.0, 1, drop_policy="position"), "found drop_policy 'position'; give"),
        (lambda: topkgating(logits(), 5, 1.0, 1), "found k 5 with num_experts 4"),
        (lambda: top1gating(logits().view(-1), 1.0, 1), r"found logits of the shape \(48,\); give"),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_mappings_of_one_tensor_parallel_rank(single_rank):
    x = torch.randn(3, 2)
    assert drop_tokens(x) is x
    assert gather_tokens(x, dim=1) is x
