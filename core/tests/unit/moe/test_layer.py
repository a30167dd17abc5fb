"""A layer of experts in one process: names and marks, groups for the optimizer, wrong arguments."""

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.moe import layer as layer_module
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)
from torch import nn

WIDTH = 4


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, use_residual=True))


def test_parameters_have_the_documented_names_and_marks():
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH, bias=False), num_experts=4, ep_size=2, use_residual=True)
    assert {name: getattr(param, "group_name", None) for name, param in moe.named_parameters()} == {
        "deepspeed_moe.gate.wg.weight": None,
        "deepspeed_moe.experts.deepspeed_experts.0.weight": "ep_size_2",
        "deepspeed_moe.experts.deepspeed_experts.1.weight": "ep_size_2",
        "mlp.weight": None,
        "coefficient.weight": None,
        "coefficient.bias": None,
    }
    assert all(is_moe_param(param) is ("experts" in name) for name, param in moe.named_parameters())
    assert (moe.num_experts, moe.num_local_experts, moe.expert_group_name) == (4, 2, "ep_size_2")


def test_old_addresses():
    assert deepspeed.moe.layer.MoE is MoE
    assert deepspeed.moe.sharded_moe.TopKGate is deepspeed.moe.gate.TopKGate
    assert deepspeed.moe.sharded_moe.MOELayer is layer_module.MOELayer


def test_copies_are_equal_and_made_experts_are_not():
    copies = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2).deepspeed_moe.experts.deepspeed_experts
    made = MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), num_experts=2).deepspeed_moe.experts.deepspeed_experts
    assert torch.equal(copies[0].weight, copies[1].weight)
    assert copies[0].weight is not copies[1].weight
    assert not torch.equal(made[0].weight, made[1].weight)


def test_output_loss_and_counts():
    x = torch.randn(2, 3, WIDTH)
    y, loss, counts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, k=2)(x)
    assert y.shape == x.shape
    assert loss.shape == ()
    assert counts.sum() == 12


def test_no_tokens_and_an_expert_without_tokens():
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2)
    assert moe(torch.empty(0, WIDTH))[0].shape == (0, WIDTH)
    with torch.no_grad():
        moe.deepspeed_moe.gate.wg.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(-1, WIDTH))
    y, loss, counts = moe(torch.ones(3, WIDTH))
    (y.sum() + loss).backward()
    assert counts.tolist() == [3, 0]
    assert (moe.deepspeed_moe.experts.deepspeed_experts[1].weight.grad == 0).all()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_tokens_that_are_not_used_get_zeros_and_change_no_others(k, drops):
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, k=k, drop_tokens=drops, min_capacity=6).eval()
    x, used = torch.randn(2, 3, WIDTH), torch.tensor([[1, 0, 1], [1, 1, 0]])
    output, _, counts = moe(x, used_token=used)
    torch.testing.assert_close(output[used == 1], moe(x[used == 1])[0])
    assert counts.sum() == 4 * k
    assert output[used == 0].eq(0).all()


def test_a_mark_of_used_tokens_of_another_size():
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4)
    with pytest.raises(ConfigError, match=r"found used_token with 1 element for 6 tokens; give one for each token"):
        moe(torch.randn(6, WIDTH), used_token=torch.ones(1))


def test_an_expert_may_return_a_tuple():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.bias

    torch.manual_seed(0)
    moe = MoE(WIDTH, Pair(WIDTH, WIDTH), num_experts=1, use_residual=True, drop_tokens=False)
    assert moe(torch.randn(3, WIDTH))[0].shape == (3, WIDTH)


def test_has_moe_layers():
    assert has_moe_layers(model()) == (True, 2)
    assert has_moe_layers(nn.Linear(2, 2)) == (False, 0)


# ---- groups for the optimizer ---------------------------------------------------------------------------------------


def described(groups):
    return [{**group, "params": len(group["params"])} for group in groups]


@pytest.mark.parametrize("wrap", [list, tuple, lambda groups: groups[0]])
def test_experts_get_groups_of_their_own(wrap):
    params = list(model().parameters())
    found = split_params_into_different_moe_groups_for_optimizer(wrap([{"params": iter(params), "lr": 0.1}]))
    assert described(found) == [
        {"params": 7, "lr": 0.1},
        {"params": 4, "lr": 0.1, "name": "ep_size_1", "moe": True},
    ]
    assert {id(param) for group in found for param in group["params"]} == {id(param) for param in params}


def test_groups_of_experts_have_a_largest_size():
    found = split_params_into_different_moe_groups_for_optimizer({"params": list(model().parameters())}, 20)
    assert [sum(param.numel() for param in group["params"]) for group in found[1:]] == [20, 20]
    small = split_params_into_different_moe_groups_for_optimizer({"params": list(model().parameters())}, 3)
    assert [sum(param.numel() for param in group["params"]) for group in small[1:]] == [16, 4, 16, 4]


def test_configured_groups():
    params = list(model().parameters())
    found = configure_moe_param_groups(params)
    assert described(found) == [
        {"params": 7, "name": "dense-params"},
        {"params": 4, "name": "ep_size_1", "moe": True},
    ]
    assert configure_moe_param_groups(found) is found
    assert described(configure_moe_param_groups([{"params": params, "lr": 1.0}]))[1]["lr"] == 1.0
    dense = list(nn.Linear(2, 2).parameters())
    assert configure_moe_param_groups(dense) is dense
    with pytest.raises(ConfigError, match="found generator; give a list"):
        configure_moe_param_groups(param for param in params)


# ---- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"num_experts 6 with ep_size 4; give an ep_size that divides the experts", {"num_experts": 6, "ep_size": 4}),
        (r"num_experts 0 with ep_size 1", {"num_experts": 0}),
        (r"num_experts 4.0; give a whole number", {"num_experts": 4.0}),
        (r"ep_size '2'; give a whole number", {"num_experts": 2, "ep_size": "2"}),
        (r"found k 3 with num_experts 2", {"num_experts": 2, "k": 3}),
    ],
)
def test_arguments_that_do_not_fit(message, arguments):
    with pytest.raises(ConfigError, match=message):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), **arguments)


@pytest.mark.parametrize(("found", "expert"), [("NoneType", None), ("int", lambda: 3)])
def test_what_is_no_expert(found, expert):
    with pytest.raises(ConfigError, match=f"MoE: expert (is|gave) {found}.*; give a module"):
        MoE(WIDTH, expert, num_experts=2)


def test_tutel_is_a_warning(monkeypatch):
    said = []
    monkeypatch.setattr(layer_module, "warn_once", said.append)
    MoE(WIDTH, nn.Linear(WIDTH, WIDTH), use_tutel=True)
    assert said == ["MoE: found use_tutel True, ignored: tokens are dispatched by sorting, without Tutel"]


def test_ranks_that_are_not_connected():
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)
    with pytest.raises(ConfigError, match=r"divided over 2 ranks, which are not connected; pass the model to deepsp"):
        moe(torch.ones(1, WIDTH))


def test_a_function_that_makes_experts_needs_to_know_the_rank():
    with pytest.raises(ConfigError, match=r"ep_size 2 before deepspeed.init_distributed\(\)"):
        MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)
