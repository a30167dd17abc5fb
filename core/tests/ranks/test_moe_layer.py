"""Layers of experts on ranks: without an engine, under zero.Init, on layouts that do not fit; tokens that go
to one rank only."""

import copy

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.moe.dispatch import send_rows, token_ranks
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import part_held
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.zero.fragments import safe_get_full_fp32_param
from torch import nn

WIDTH = 4


def layer(ep_size=2, make=lambda: nn.Linear(WIDTH, WIDTH), **arguments):
    """Experts that differ, on every rank the same ones whatever `ep_size` is."""
    torch.manual_seed(0)
    return MoE(WIDTH, make, num_experts=4, ep_size=ep_size, **{"drop_tokens": False, **arguments})


def stacked():
    return ExpertMLP(WIDTH, 2 * WIDTH)


def single():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))


def tokens(rank):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))


# ---- without an engine -----------------------------------------------------------------------------------------------


def plain_job():
    groups.set_mesh(None)
    moe = layer()
    moe.set_deepspeed_parallelism()
    return moe(tokens(dist.get_rank()))[0].detach()


def test_a_layer_without_an_engine():
    expected = [layer(ep_size=1)(tokens(rank))[0].detach() for rank in range(2)]
    torch.testing.assert_close(run_ranks(2, plain_job), expected)


def no_tokens_job():
    groups.set_mesh(None)
    moe = layer(k=2, drop_tokens=True)
    moe.set_deepspeed_parallelism()
    tokens_TH = tokens(0) if dist.get_rank() == 0 else torch.zeros(0, WIDTH)
    out = moe(tokens_TH)[0]
    out.sum().backward()
    return out.detach()


def test_a_rank_without_tokens():
    full, empty = run_ranks(2, no_tokens_job)
    torch.testing.assert_close(full, layer(ep_size=1, k=2, drop_tokens=True)(tokens(0))[0].detach())
    assert empty.shape == (0, WIDTH)


def one_sided_job():
    """All rows go to rank 1, and their gradients come back."""
    groups.set_mesh(None)
    ranks, rank = token_ranks(groups.viewed_mesh(), 3), dist.get_rank()
    rows = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    to_each = [0, rank + 1, 0]
    from_each = [1, 2, 3] if rank == 1 else [0, 0, 0]
    received = send_rows(rows, to_each, from_each, ranks)
    (received * 2).sum().backward()
    return received.detach(), rows.grad


def test_rows_may_all_go_to_one_rank():
    found = run_ranks(3, one_sided_job)
    assert [received.tolist() for received, _ in found] == [[], [[0.0] * 2, *[[1.0] * 2] * 2, *[[2.0] * 2] * 3], []]
    assert all((grad == 2).all() for _, grad in found)


# ---- with an engine --------------------------------------------------------------------------------------------------


def init_job(make, ep_size):
    groups.set_mesh(None)
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        moe = layer(ep_size, make, use_residual=True)
    engine = make_engine(moe, 3, train_micro_batch_size_per_gpu=1)
    found = {}
    for name, param in moe.named_parameters():
        part = part_held(param)
        found[part.name if part else name] = safe_get_full_fp32_param(param).clone()
    output = engine(tokens(dist.get_rank()))[0].detach()
    engine.destroy()
    return found, output


@pytest.mark.parametrize("make", [single, stacked])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_zero_init_makes_the_same_experts(make, ep_size):
    plain = layer(1, make, use_residual=True)
    whole = dict(plain.named_parameters())
    found = run_ranks(2, init_job, make, ep_size)
    assert {name for weights, _ in found for name in weights} == whole.keys()
    for rank, (weights, output) in enumerate(found):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[name].detach())
        torch.testing.assert_close(output, plain(tokens(rank))[0].detach())


def copy_job(make, stage):
    """A step of a copy of a layer whose experts are divided, made after a forward; each rank has tokens of its own."""
    groups.set_mesh(None)
    first = layer(2, make)
    first.set_deepspeed_parallelism()
    first(tokens(dist.get_rank()))
    moe = copy.deepcopy(first)
    engine = make_engine(moe, stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine.backward(engine(tokens(dist.get_rank()))[0].square().mean())
    engine.step()
    found = {}
    for name, param in moe.named_parameters():
        part = part_held(param)
        found[part.name if part else name] = safe_get_full_fp32_param(param).clone()
    engine.destroy()
    return found


@pytest.mark.parametrize("make", [single, stacked])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_copy_of_a_layer_has_experts(make, stage):
    plain = layer(1, make)
    (sum(plain(tokens(rank))[0].square().mean() for rank in range(2)) / 2).backward()
    for found in run_ranks(2, copy_job, make, stage):
        for name, value in found.items():
            param = plain.get_parameter(name)
            torch.testing.assert_close(value, param - 0.1 * param.grad)


def copied_job():
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        expert = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(ConfigError, match=r"the expert \(Linear\) was sharded by zero.Init .*; pass a function"):
            MoE(WIDTH, expert, num_experts=2)


def test_a_sharded_expert_cannot_be_copied():
    run_ranks(2, copied_job)


# ---- layouts that do not fit -----------------------------------------------------------------------------------------


def over_job():
    groups.set_mesh(None)
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=4)
    with pytest.raises(ConfigError, match=r"expert parallel size: found 4, but dp x sp has 2 ranks; give a divisor"):
        make_engine(moe)
    with pytest.raises(ConfigError, match=r"expert parallel size: found 4, but dp x sp has 2 ranks; give a divisor"):
        layer(ep_size=4)


def test_more_ranks_for_experts_than_there_are():
    run_ranks(2, over_job)


def other_mesh_job(make):
    """Of four ranks, 1 and 2 made each other's experts."""
    groups.set_mesh(None)
    moe = layer(make=make)
    moe.set_deepspeed_parallelism(use_data_before_expert_parallel_=True)
    return moe(tokens(dist.get_rank()))[0].detach()


@pytest.mark.parametrize("make", [single, stacked])
def test_experts_that_were_made_for_another_layout_are_sent(make):
    expected = [layer(ep_size=1, make=make)(tokens(rank))[0].detach() for rank in range(4)]
    torch.testing.assert_close(run_ranks(4, other_mesh_job, make), expected)


def other_mesh_refused_job():
    groups.set_mesh(None)
    moe = layer()
    for param in moe.deepspeed_moe.experts.parameters():
        param.tensor_model_parallel = True
    with pytest.raises(ConfigError, match=r"MoE layer: rank 1 made part 1 .* it holds part 0\. .* divided since; lay"):
        moe.set_deepspeed_parallelism(use_data_before_expert_parallel_=True)


def test_divided_experts_that_were_made_for_another_layout_are_refused():
    run_ranks(4, other_mesh_refused_job)


def after_tp_model_init_job(stage):
    """A whole model, built when the ranks are laid out for another one that they divide."""
    groups.reset()
    deepspeed.tp_model_init(single(), 2)
    engine = make_engine(layer(), stage)
    found = []
    for _ in range(2):
        output = engine(tokens(dist.get_rank()))[0]
        engine.backward(output.square().mean())
        engine.step()
        found.append(output.detach())
    engine.destroy()
    groups.reset()
    return found


def whole_losses(num_ranks):
    """The outputs by rank of two steps of a layer that one rank has whole."""
    moe = layer(ep_size=1)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2, weight_decay=0.1)  # as that of `make_engine`
    outputs = []
    for _ in range(2):
        outputs.append([moe(tokens(rank))[0] for rank in range(num_ranks)])
        torch.stack(outputs[-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [[each[rank].detach() for each in outputs] for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (2, 3), (4, 2)])
def test_experts_of_a_whole_model_after_tp_model_init(num_ranks, stage):
    torch.testing.assert_close(run_ranks(num_ranks, after_tp_model_init_job, stage), whole_losses(num_ranks))


def data_first_job():
    """Of four ranks the first two hold one half of the experts."""
    groups.set_mesh(None)
    moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2, drop_tokens=False)
    engine = make_engine(moe, 1, use_data_before_expert_parallel_=True)
    part = part_held(moe.deepspeed_moe.experts.deepspeed_experts[0].weight)
    replicas = dist.get_all_ranks_from_group(groups._get_expert_data_parallel_group("ep_size_2"))
    engine.destroy()
    return part.name, replicas


def test_data_before_experts_by_the_configuration():
    found = run_ranks(4, data_first_job)
    path = "deepspeed_moe.experts.deepspeed_experts"
    assert found == [(f"{path}.{first}.weight", ranks) for first, ranks in ((0, [0, 1]), (2, [2, 3])) for _ in range(2)]


# ---- experts over tensor-parallel ranks ------------------------------------------------------------------------------


def undividable_job():
    groups.set_mesh({"tp": 2})
    with pytest.raises(ConfigError, match=r"the structure of Linear does not show which of its layers can be divided"):
        make_engine(layer(1, enable_expert_tensor_parallelism=True))
    with pytest.raises(ConfigError, match=r"enable_expert_tensor_parallelism without an engine; pass the model to"):
        layer(1, single, enable_expert_tensor_parallelism=True).set_deepspeed_parallelism()
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        sharded = layer(1, single, enable_expert_tensor_parallelism=True)
    with pytest.raises(ConfigError, match=r"enable_expert_tensor_parallelism with experts that were sharded by zero"):
        make_engine(sharded, 3)


def test_experts_that_cannot_be_divided_by_tensor_parallelism():
    run_ranks(2, undividable_job)


class OwnParallel(nn.Module):
    """As Megatron's: divided by its author, with its mark."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH // 2))
        self.weight.tensor_model_parallel = True

    def forward(self, x):
        return x * self.weight.sum()


def own_parallel_job():
    groups.set_mesh({"tp": 2})
    moe = layer(1, OwnParallel, enable_expert_tensor_parallelism=True)
    engine = make_engine(moe)
    shape = moe.deepspeed_moe.experts.deepspeed_experts[0].weight.shape
    engine.destroy()
    return tuple(shape)


def test_experts_with_tensor_parallelism_of_their_own_stay():
    assert run_ranks(2, own_parallel_job) == [(WIDTH, WIDTH // 2)] * 2


def mappings_job():
    groups.set_mesh({"tp": 2})
    whole = torch.arange(8.0).view(2, 4).requires_grad_()
    own = drop_tokens(whole, dim=1)
    joined = gather_tokens(own * (dist.get_rank() + 1), dim=1)
    (joined * torch.arange(4.0)).sum().backward()
    with pytest.raises(ConfigError, match=r"found 3 along dim 0, which 2 tensor-parallel ranks cannot divide; pad it "):
        drop_tokens(torch.ones(3))
    return own.detach(), joined.detach(), whole.grad


def test_tokens_are_dropped_and_gathered_over_tensor_parallel_ranks():
    scale = torch.tensor([1.0, 1.0, 2.0, 2.0])
    whole = torch.arange(8.0).view(2, 4)
    for rank, (own, joined, grad) in enumerate(run_ranks(2, mappings_job)):
        assert own.tolist() == whole.chunk(2, 1)[rank].tolist()
        assert joined.tolist() == (whole * scale).tolist()
        assert grad.tolist() == (torch.arange(4.0) * scale).expand(2, -1).tolist()
