"""`safe_get_*` and `safe_set_*` on two ranks: what they give is what plain torch has, and what they set is used."""

import re
from itertools import product

import pytest
import torch
import torch.distributed as dist
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn

every_stage = pytest.mark.parametrize("stage", [0, 1, 2])
PRESCALED = {"prescale_gradients": True, "gradient_predivide_factor": 8.0}
CASES = list(product([{}, PRESCALED], [1, 3]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def create_engine(stage, parameters=None, **keys):
    torch.manual_seed(3)
    net = Net()
    arguments = {"model_parameters": parameters and parameters(net)}
    return make_engine(net, stage, arguments=arguments, zero_optimization={"reduce_bucket_size": 10}, **keys)


def loss_of(net, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return (net(torch.randn(4, 5, generator=generator).to(dtype)).float() - 1.0).square().mean()


def plain_gradients(num_backwards):
    torch.manual_seed(3)
    net = Net()
    for step in range(num_backwards):
        (loss_of(net, step) / num_backwards).backward()
    for param in [*net.first.parameters(), *net.last.parameters()]:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    return {name: param.grad for name, param in net.named_parameters()}


def gradient_job(stage, keys, accumulation):
    engine = create_engine(stage, gradient_accumulation_steps=accumulation, **keys)
    for step in range(accumulation):
        engine.backward(loss_of(engine, step))
        for name, param in engine.module.named_parameters():  # also in the middle, where it must not disturb
            gradient = safe_get_full_grad(param)
            assert (gradient is None) is name.startswith("unused")
        if step < accumulation - 1:
            engine.step()
    expected = plain_gradients(accumulation)
    for name, param in engine.module.named_parameters():
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            assert gradient.shape == param.shape
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    engine.step()
    assert all(safe_get_full_grad(param) is None for param in engine.module.parameters())


@pytest.mark.parametrize(("keys", "accumulation"), swept(CASES, lambda keys, count: (not keys) is (count == 3)))
@every_stage
def test_gradients_are_the_averages(stage, keys, accumulation):
    run_ranks(2, gradient_job, stage, keys, accumulation)


def set_gradient_job(stage, keys):
    """The step takes the gradients that were set, clips them by their own norm, and updates what had none."""
    engine = create_engine(stage, gradient_clipping=0.5, **keys)
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        for seed, (param, plain) in enumerate(zip(engine.module.parameters(), net.parameters(), strict=True)):
            value = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + seed))
            safe_set_full_grad(param, value)
            torch.testing.assert_close(safe_get_full_grad(param), value, rtol=1e-6, atol=0)
            plain.grad = value
        engine.step()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
    for param, plain in zip(engine.module.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(param, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("keys", [{}, PRESCALED], ids=["", "prescaled"])
@every_stage
def test_gradients_that_were_set_are_the_ones_used(stage, keys):
    run_ranks(2, set_gradient_job, stage, keys)


def state_job(stage, keys):
    engine = create_engine(stage, **keys)
    dtype = engine.module.first.weight.dtype
    param = engine.module.first.weight
    assert safe_get_full_optimizer_state(param, "exp_avg") is None
    engine.backward(loss_of(engine, 0, dtype))
    engine.step()
    moment = safe_get_full_optimizer_state(param, "exp_avg")
    assert moment.shape == param.shape
    assert moment.dtype == torch.float32
    assert moment.abs().max() > 0

    value = torch.arange(35.0).view(7, 5) / 3
    variance = safe_get_full_optimizer_state(param, "exp_avg_sq")
    safe_set_full_optimizer_state(param, value, "exp_avg")
    assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), value)
    safe_set_full_fp32_param(param, value)
    assert torch.equal(safe_get_full_fp32_param(param), value)
    assert torch.equal(param, value.to(dtype))

    before = [other.detach().clone() for other in engine.module.parameters()]
    engine.backward(loss_of(engine, 1, dtype))
    engine.step()
    master = safe_get_full_fp32_param(param)
    assert torch.equal(param, master.to(dtype))
    gradient_share = safe_get_full_optimizer_state(param, "exp_avg") - 0.9 * value  # betas are 0.9 and 0.999
    assert gradient_share.abs().max() <= 0.1 * 3  # a tenth of a gradient: the moment that was set went on
    assert not torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), variance)
    assert not torch.equal(master, value)
    assert torch.equal(engine.module.unused.weight, before[4])


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@every_stage
def test_weights_and_states(stage, keys):
    run_ranks(2, state_job, stage, keys)


def added_job(stage):
    """A parameter of a group that came later is known too."""
    engine = create_engine(stage, lambda net: list(net.first.parameters()))
    param = engine.module.last.weight
    assert safe_get_full_fp32_param(param) is None
    engine.optimizer.add_param_group({"params": [param]})
    engine.backward(loss_of(engine, 0))
    torch.testing.assert_close(safe_get_full_grad(param), plain_gradients(1)["last.weight"], rtol=1e-5, atol=1e-7)
    engine.step()
    assert torch.equal(safe_get_full_fp32_param(param), param)
    assert safe_get_full_optimizer_state(param, "exp_avg").shape == param.shape


@every_stage
def test_a_group_added_later(stage):
    run_ranks(2, added_job, stage)


def foreign_job():
    create_engine(1)
    param = nn.Parameter(torch.ones(2))
    assert safe_get_full_fp32_param(param) is None
    for call in (safe_set_full_grad, safe_set_full_fp32_param):
        with pytest.raises(KeyError, match="no engine manages"):
            call(param, torch.ones(2))


def test_a_parameter_of_no_engine():
    run_ranks(2, foreign_job)


def refusal_job(stage, change):
    """Every rank raises, and keeps its weight, where a rank's value is refused or another one."""
    engine = create_engine(stage)
    before = safe_get_full_fp32_param(engine.module.first.weight)
    value = torch.ones(7, 5) if dist.get_rank() == 0 else change
    with pytest.raises((TypeError, ValueError)) as said:
        safe_set_full_fp32_param(engine.module.first.weight, value)
    torch.testing.assert_close(safe_get_full_fp32_param(engine.module.first.weight), before, rtol=0, atol=0)
    engine.backward(loss_of(engine, 0))
    engine.step()
    return str(said.value)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (torch.ones(3, 3), "rank 1 refused its value, and nothing was changed: .* shape \\(3, 3\\)"),
        ([1.0], "rank 1 refused its value, .*list, wanted a tensor"),
        (torch.zeros(7, 5), "rank 1 and rank 0 brought different values .* Give the same value on every rank"),
    ],
)
def test_a_value_that_one_rank_refuses_is_refused_by_all(stage, change, expected):
    first, _ = run_ranks(2, refusal_job, stage, change)
    assert re.search(expected, first)
