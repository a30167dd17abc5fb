"""A forward inside a backward: checkpoints around the engine, losses that call it several times, nested checkpoints.

Every gradient arrives once, in every stage, whoever starts the backward. The reference is plain torch without
checkpoints, with gradients averaged by hand.
"""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.testing.distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_STEPS, ACCUMULATION = 2, 2


def create_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def batch(index):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + index)
    return torch.randn(4, 5, generator=generator).requires_grad_()


def around(model, use_reentrant):
    """The model under one checkpoint."""
    return lambda x: checkpoint(model, x, use_reentrant=use_reentrant)


def around_twice(model, use_reentrant):
    """Under a checkpoint in a checkpoint: its forward runs in a backward inside a backward."""
    return around(around(model, use_reentrant), use_reentrant)


def preference_loss(model, x):
    """As in DPO and reward models: two calls of the model in one loss."""
    chosen, rejected = model(x), model(x * 0.5 + 1)
    return -nn.functional.logsigmoid((chosen - rejected).mean(dim=1)).mean() + chosen.square().mean()


def train_plain():
    net = create_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(NUM_STEPS):
        for micro in range(ACCUMULATION):
            (preference_loss(net, batch(step * ACCUMULATION + micro)) / ACCUMULATION).backward()
        for param in net.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def train_engine(stage, wrap, use_reentrant, by_engine):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=create_net(), config=config)
    model = wrap(engine, use_reentrant)
    for index in range(NUM_STEPS * ACCUMULATION):
        loss = preference_loss(model, batch(index))
        if by_engine:
            engine.backward(loss)
        else:
            loss.backward()
        engine.step()
    weights = list(engine.module.parameters())
    engine.destroy()
    return weights


#: (wrap, use_reentrant, by_engine)
LOOPS = [
    (around, True, True),
    (around, True, False),
    (around, False, True),
    (around, False, False),
    (around_twice, True, False),
]


def checkpoints_job(stage):
    expected = train_plain()
    for wrap, use_reentrant, by_engine in LOOPS:
        found = train_engine(stage, wrap, use_reentrant, by_engine)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=str((wrap, use_reentrant, by_engine)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_gradient_is_lost_or_counted_twice(stage):
    run_ranks(2, checkpoints_job, stage)


def scaled_job():
    """The scale is the user's for one backward; a second window in it would take the loss for an unscaled one."""
    config = {
        "train_batch_size": 1,
        "fp16": {"enabled": True, "loss_scale": 64},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    norms = []
    for wrap in (lambda model, use_reentrant: model, around_twice):
        engine, *_ = deepspeed.initialize(model=create_net(), config=config)
        model, x = wrap(engine, True), batch(0).detach().half().requires_grad_()
        engine.scale((model(x) + model(2 * x)).float().sum()).backward()
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == norms[1] > 0


def test_nested_checkpoints_of_a_scaled_loss_are_one_backward():
    run_ranks(1, scaled_job)
