"""`engine.scale(loss).backward()` in fp16: whatever is scaled and differentiated trains as plain torch, all else is
refused. Every stage, on one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

STAGES = (0, 1, 2, 3)
LEARNING_RATE = 0.1
FP16 = {"enabled": True, "initial_scale_power": 8}


def create_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def create_engine(stage, **keys):
    return make_engine(
        create_net(),
        stage,
        optimizer={"type": "SGD", "params": {"lr": LEARNING_RATE}},
        fp16=FP16,
        gradient_clipping=0,
        **keys,
    )


def inputs():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def losses(model):
    """Two losses of one forward."""
    out = model(inputs().to(next(model.parameters()).dtype)).float()
    return out.mean(), out.square().mean()


def both(model):
    one, other = losses(model)
    return one + other


def train_plain():
    net = create_net()
    both(net).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for param in net.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    optimizer.step()
    return [param.detach() for param in net.parameters()]


def weights(engine):
    return [safe_get_full_fp32_param(param) for param in engine.module.parameters()]


# ---- what trains --------------------------------------------------------------------------------------------------


def two_scaled_before_either(engine):
    one, other = (engine.scale(loss) for loss in losses(engine))
    one.backward(retain_graph=True)
    other.backward()


def sum_of_two_scaled(engine):
    one, other = losses(engine)
    (engine.scale(one) + engine.scale(other)).backward()


def list_of_two_scaled(engine):
    torch.autograd.backward([engine.scale(loss) for loss in losses(engine)])


def same_one_again(engine):
    loss = engine.scale(both(engine))
    loss.backward(retain_graph=True)
    engine.zero_grad()
    loss.backward()


def gradient_of_an_output_first(engine):
    out = engine(inputs().half())
    loss = engine.scale(out.float().mean() + out.float().square().mean())
    (grad,) = torch.autograd.grad(loss, [out], retain_graph=True)
    assert torch.equal(grad, (256 * (0.5 + out.detach().float())).half())
    loss.backward()


def a_gradient_with_a_graph(engine):
    loss = engine.scale(both(engine))
    loss.backward(create_graph=True)


def one_that_is_never_differentiated(engine):
    engine.scale(both(engine))
    engine.scale(both(engine)).backward()


RIGHT = [
    two_scaled_before_either,
    sum_of_two_scaled,
    list_of_two_scaled,
    same_one_again,
    gradient_of_an_output_first,
    a_gradient_with_a_graph,
    one_that_is_never_differentiated,
]


def right_job(stage):
    expected = train_plain()
    for run in RIGHT:
        engine = create_engine(stage)
        run(engine)
        engine.step()
        for found, other in zip(weights(engine), expected, strict=True):
            torch.testing.assert_close(found, other, atol=3e-4, rtol=0, msg=run.__name__)
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_scaled_loss_trains_as_plain_torch(stage, world_size):
    run_ranks(world_size, right_job, stage)


def weights_alone_job(stage):
    """No output of a forward is passed, and maybe no parameter with a hook."""
    engine = create_engine(stage)
    for index, param in enumerate(engine.module.parameters()):
        engine.scale(param.float().sum()).backward()
        before = weights(engine)
        engine.step()
        for place, (one, other) in enumerate(zip(before, weights(engine), strict=True)):
            torch.testing.assert_close(one - other, torch.full_like(one, LEARNING_RATE * (place == index)))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES[:3])
def test_a_scaled_loss_of_weights_alone_is_known_for_one(stage, world_size):
    run_ranks(world_size, weights_alone_job, stage)


# ---- what is refused ----------------------------------------------------------------------------------------------


def after_one_that_is_left(engine):
    engine.scale(both(engine))
    both(engine).backward()


def after_an_exception_between(engine):
    with pytest.raises(OverflowError):
        engine.scale(both(engine)) + int(float("inf"))
    both(engine).backward()


def after_a_scaled_one(engine):
    one, other = losses(engine)
    engine.scale(one).backward(retain_graph=True)
    other.backward()


def before_a_scaled_one(engine):
    one, other = losses(engine)
    one.backward(retain_graph=True)
    engine.scale(other).backward()


def in_a_sum(engine):
    one, other = losses(engine)
    (engine.scale(one) + other).backward()


def in_a_list(engine):
    one, other = losses(engine)
    torch.autograd.backward([other, engine.scale(one)])


def by_weights_in_a_sum(engine):
    (engine.scale(both(engine)) + sum(param.float().sum() for param in engine.parameters())).backward()


def unused_in_a_graph_of_another(engine):
    """Another engine's scale does not count."""
    other = create_engine(0)
    other.scale(both(engine)).backward()


WRONG = [
    (after_one_that_is_left, "an unscaled loss"),
    (after_an_exception_between, "an unscaled loss"),
    (after_a_scaled_one, "an unscaled loss"),
    (before_a_scaled_one, "an unscaled loss"),
    (in_a_sum, "a sum of scaled and unscaled losses"),
    (in_a_list, "a sum of scaled and unscaled losses"),
    (by_weights_in_a_sum, "a sum of scaled and unscaled losses"),
    (unused_in_a_graph_of_another, "an unscaled loss"),
]


def wrong_job(stage):
    expected = train_plain()
    for run, found in WRONG:
        engine = create_engine(stage)
        with pytest.raises(StateError, match=f"loss scale is 256 and loss.backward.. got {found}"):
            run(engine)
        engine.zero_grad()
        engine.scale(both(engine)).backward()
        engine.step()
        for one, other in zip(weights(engine), expected, strict=True):
            torch.testing.assert_close(one, other, atol=3e-4, rtol=0, msg=run.__name__)
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_an_unscaled_loss_is_refused_whatever_was_scaled(stage, world_size):
    run_ranks(world_size, wrong_job, stage)


def other_scale_job(stage):
    engine = create_engine(stage)
    kept = engine.scale(both(engine))
    for _ in range(2):  # the first one is forgiven
        engine.backward(both(engine) * float("inf"))
        engine.step()
    with pytest.raises(StateError, match="loss scale is 128 .* that was scaled by 256 before a step changed it"):
        kept.backward()


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_was_scaled_by_a_former_scale_is_refused(stage):
    run_ranks(1, other_scale_job, stage)


def twice_job(stage):
    engine = create_engine(stage)
    with pytest.raises(StateError, match=r"engine\.backward\(loss\) scales the loss, and found one that engine\.scale"):
        engine.backward(engine.scale(both(engine)))
    engine.backward(both(engine))
    engine.step()
    for one, other in zip(weights(engine), train_plain(), strict=True):
        torch.testing.assert_close(one, other, atol=3e-4, rtol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_would_be_scaled_twice_is_refused(stage):
    run_ranks(1, twice_job, stage)


def set_by_hand_job(stage):
    expected = train_plain()
    told = r"loss scale is 256 and found gradients that came with no backward .*; call engine\.scale\(loss\)\.backward"
    engine = create_engine(stage)
    for scaled in (engine.scale, lambda loss: 256 * loss):
        params = list(engine.module.parameters())
        for param, grad in zip(params, torch.autograd.grad(scaled(both(engine)), params), strict=True):
            param.grad = grad
        with pytest.raises(StateError, match=told):
            engine.step()
        engine.zero_grad()
    with pytest.raises(
        StateError, match=r"got an unscaled loss, or one that was scaled by hand; call engine\.backward"
    ):
        (256 * both(engine)).backward()
    engine.zero_grad()
    engine.scale(both(engine)).backward()
    engine.step()
    for one, other in zip(weights(engine), expected, strict=True):
        torch.testing.assert_close(one, other, atol=3e-4, rtol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_were_set_and_losses_that_were_scaled_by_hand_are_refused_as_such(stage):
    run_ranks(1, set_by_hand_job, stage)
