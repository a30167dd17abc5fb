"""What ranks agree on in a step whose gradients are on a device: the flags between the hosts, the norm on the device.

The reference is plain torch on the host, with the mean of the losses of both ranks.
"""

import contextlib
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import own_group
from deepspeed.errors import CommError
from deepspeed.ops.optimizer import ReferenceOptimizer
from deepspeed.testing.models import make_engine
from torch import nn
from torch.utils.checkpoint import checkpoint

CLIP = 0.05
#: by step and rank, the layers that a batch passes
WAYS = [("ab", "a"), ("c", "ca"), ("b", "b"), ("abc", "c")]
#: the same on both ranks, as stage 3 wants it
SAME_WAYS = [("ab", "ab"), ("c", "c"), ("b", "b"), ("abc", "abc")]


class Branches(nn.Module):
    """A batch passes some of the layers, each of them twice; a re-entrant checkpoint brings two gradients."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.reentrant = reentrant

    def forward(self, x, way):
        x = x.requires_grad_()
        for name in way * 2:
            layer = self.layers[name]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x))
        return x.float().square().mean()


def batch(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))


def create_model(reentrant=False):
    torch.manual_seed(0)
    return Branches(reentrant)


def plain(ways):
    model = create_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for step, by_rank in enumerate(ways):
        optimizer.zero_grad()
        sum(model(batch(step, rank), way) / 2 for rank, way in enumerate(by_rank)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return norms, model.state_dict()


def train(stage, ways, reentrant=False, connects=True, optimizer=None, is_bf16=False):
    """Norms and weights; `connects`: whether the hosts do."""
    model = create_model(reentrant).to(get_accelerator().current_device_name())
    with contextlib.ExitStack() as stack:
        if not connects:
            stack.enter_context(mock.patch.object(own_group, "_connect", side_effect=RuntimeError("no address")))
        engine = make_engine(
            model,
            stage,
            gradient_clipping=CLIP,
            zero_optimization={"reduce_bucket_size": 20, "stage3_param_persistence_threshold": 0},
            zero_allow_untested_optimizer=True,
            arguments={"optimizer": optimizer(model.parameters())} if optimizer else None,
            optimizer=None if optimizer else {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            bf16={"enabled": is_bf16, "check_grad_overflow": False},  # else the scale is a number
        )
    norms = []
    dtype = next(model.parameters()).dtype
    for step, by_rank in enumerate(ways):
        engine.backward(engine(batch(step, dist.get_rank()).to(engine.device, dtype), by_rank[dist.get_rank()]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms, {name: value.cpu() for name, value in model.state_dict().items()}


def assert_equal(found, expected, **tolerance):
    for norms, weights in found:
        assert all(type(norm) is float for norm in norms)
        torch.testing.assert_close(norms, expected[0], **(tolerance or {"rtol": 1e-5, "atol": 1e-7}))
        torch.testing.assert_close(weights, expected[1], **tolerance)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_unused_parameters_change_from_step_to_step(sim_ranks, stage):
    ways = SAME_WAYS if stage == 3 else WAYS
    assert_equal(sim_ranks(train, stage, ways), plain(ways))


@pytest.mark.parametrize("stage", [0, 2])
def test_late_gradients_are_reduced_on_all_ranks(sim_ranks, stage):
    assert_equal(sim_ranks(train, stage, WAYS, True), plain(WAYS))


def test_without_connections_between_hosts_the_flags_go_over_the_device(sim_ranks):
    assert_equal(sim_ranks(train, 2, WAYS, False, False), plain(WAYS))


def written_job():
    engine = make_engine(nn.Linear(4, 1), 0, gradient_clipping=CLIP, optimizer={"type": "SGD", "params": {"lr": 0.5}})
    engine.backward(engine(torch.ones(2, 4, device=engine.device)).mean())
    before = torch.sim.host_waits()
    for param in engine.module.parameters():
        param.grad.mul_(3)
    engine.step()
    waits = torch.sim.host_waits() - before
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return waits, norm


def test_the_norm_of_gradients_that_the_user_wrote_stays_on_the_device(sim_ranks):
    assert sim_ranks(written_job) == [(0, pytest.approx(3 * 5**0.5))] * 2


# ----- an optimizer whose kernel takes the scale as a number ---------------------------------------------------------


class OnePassSGD(ReferenceOptimizer):
    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    def update_params(self, params, group):
        for param in params:
            param.sub_(param.grad, alpha=group["lr"])

    def has_one_pass(self, group):
        return True

    def update_one_pass(self, params, grads, copies, scale, group):
        assert scale == 1.0
        for param, grad in zip(params, grads, strict=True):
            param.sub_(grad.to(param.dtype), alpha=group["lr"])
        for copy, param in zip(copies, params, strict=bool(copies)):
            copy.copy_(param)


class TwoPassSGD(OnePassSGD):
    """The engine scales its gradients, in fp32."""

    def has_one_pass(self, group):
        return False


@pytest.mark.parametrize("is_bf16", [False, True])
def test_gradients_are_scaled_for_a_kernel_before_its_pass(sim_ranks, is_bf16):
    ways = [("abc", "ab")]
    expected, _ = sim_ranks(train, 2, ways, False, True, TwoPassSGD, is_bf16)
    # in bf16 the scaled gradients are rounded once more
    tolerance = {"rtol": 0.0, "atol": CLIP * 2**-8 if is_bf16 else 0.0}
    assert_equal(sim_ranks(train, 2, ways, False, True, OnePassSGD, is_bf16), expected, **tolerance)


# ----- a model that is divided ---------------------------------------------------------------------------------------


def divided_job():
    model = nn.Linear(2, 1, bias=False).to(get_accelerator().current_device_name())
    model.weight.tensor_model_parallel = True
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=model, config=config, mesh_param={"dp": 1, "tp": 2})[0]
    engine.backward(engine(torch.tensor([[3.0, 0.0], [0.0, 4.0]][dist.get_rank()], device=engine.device)).sum())
    before = torch.sim.host_waits()
    engine.step()
    waits = torch.sim.host_waits() - before
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return waits, norm, model.weight.cpu()


def test_the_norm_over_tensor_parallel_ranks_stays_on_the_device(sim_ranks):
    for rank, (waits, norm, weight) in enumerate(sim_ranks(divided_job)):
        assert (waits, norm) == (0, 5.0)
        torch.testing.assert_close(weight, torch.tensor([[[-0.6, 0.0]], [[0.0, -0.8]]][rank]))


# ----- a rank that fails ---------------------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


class FailsAtTheEnd(torch.autograd.Function):
    """Its backward is the last of all, when every bucket is launched."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise Boom("the batch is bad")
        return grad, None


def failing_job():
    torch.manual_seed(0)
    engine = make_engine(nn.Linear(128, 128), 2, optimizer={"type": "SGD", "params": {"lr": 0.5}})

    def train_step(fails):
        x = torch.ones(2, 128, device=engine.device, requires_grad=True)
        engine.backward(engine(FailsAtTheEnd.apply(x, fails)).square().mean())
        engine.step()

    train_step(False)
    try:
        train_step(dist.get_rank() == 1)
        said = "nothing"
    except (Boom, CommError) as error:
        said = str(error)
    train_step(False)
    weights = engine.module.weight.cpu()
    engine.destroy()
    return said, weights


def test_a_rank_that_fails_ends_the_step_of_its_peer_and_both_can_go_on(sim_ranks):
    (peer, weights), (failed, same) = sim_ranks(failing_job)
    assert "rank 1 failed with Boom: the batch is bad" in peer
    assert "the batch is bad" in failed
    assert torch.equal(weights, same)
