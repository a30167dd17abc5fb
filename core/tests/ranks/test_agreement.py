"""Ranks that were given different models, optimizers or configurations: one clear error on every rank, and no hang."""

import re
from dataclasses import replace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from torch import nn


def initialize_job(net, stages, bucket_sizes, num_trained):
    """Each argument holds one value per rank."""
    rank = dist.get_rank()
    model = net[rank]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stages[rank], "reduce_bucket_size": bucket_sizes[rank]},
    }
    optimizer = torch.optim.AdamW(list(model.parameters())[: num_trained[rank]])
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return str(caught.value)


SAME = {"net": [nn.Linear(4, 2)] * 3, "stages": [1] * 3, "bucket_sizes": [100] * 3, "num_trained": [2] * 3}
DIFFERENT = {
    "the module": {"net": [nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(4, 2)]},
    "zero_optimization.stage": {"stages": [1, 0, 1]},
    "reduce_bucket_size": {"bucket_sizes": [100, 10, 100]},
    "the optimizer's parameters": {"num_trained": [2, 1, 2]},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_named_on_every_rank(what):
    arguments = {**SAME, **DIFFERENT[what]}
    for message in run_ranks(3, initialize_job, *arguments.values()):
        assert what in message
        assert "rank 1 differs from rank 0" in message


def wishes_job():
    """A backend that wants other buckets on one rank: the smaller ones are taken by all."""
    wish = 400 if dist.get_rank() == 1 else 4_000_000
    wishes = {"preferred_bucket_bytes": wish, "preferred_all_reduce_bytes": wish}
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)])
    kind = type(deepspeed.comm.group_backend())
    kept = kind.capabilities
    kind.capabilities = property(lambda self: replace(kept.fget(self), **wishes))
    try:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {}}}
        engine, *_ = deepspeed.initialize(model=net, config=config)
    finally:
        kind.capabilities = kept
    engine.backward(engine(torch.randn(2, 300)).square().mean())
    engine.step()
    return len(engine.sharding.gradients.memory.buckets), [param.detach().clone() for param in net.parameters()]


def test_buckets_are_the_same_whatever_each_rank_wishes():
    (num_buckets, weights), (other_num_buckets, other_weights) = run_ranks(2, wishes_job)
    assert num_buckets == other_num_buckets > 1
    assert all(map(torch.equal, weights, other_weights))


def sizes_job(key):
    zero = {"stage": 3, key: 1000 * dist.get_rank()}
    with pytest.raises(ConfigError, match=f"{key} must be the same on all ranks, and rank 1 differs"):
        deepspeed.initialize(model=nn.Linear(3, 3), config={"train_batch_size": 2, "zero_optimization": zero})


@pytest.mark.parametrize("key", ["stage3_max_reuse_distance", "stage3_param_persistence_threshold"])
def test_sizes_of_stage_3_that_differ_are_named(key):
    run_ranks(2, sizes_job, key)


def batch_job(key):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2} | {key: 1 + dist.get_rank()}
    with pytest.raises(ConfigError, match=f"{key} must be the same on all ranks, and rank 1 dif"):
        deepspeed.initialize(model=nn.Linear(3, 3), config=config)


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "train_micro_batch_size_per_gpu"])
def test_a_batch_that_differs_is_named(key):
    """One rank would wait in the reduction of a step that the other does not make yet, or its samples count more."""
    run_ranks(2, batch_job, key)


def keys_job(section, values, stage):
    """One rank would silently step by other numbers than its peers."""
    rank = dist.get_rank()
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage}}
    keys |= {section: values[rank]} if values[rank] is not None else {}
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=nn.Linear(3, 3), config={"train_micro_batch_size_per_gpu": 2, **keys})
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "stage", "found"),
    [
        ("optimizer", [{"type": "SGD", "params": {"lr": lr}} for lr in (0.1, 0.2)], 0, "dampening 0, .*lr 0.2"),
        (
            "optimizer",
            [{"type": "AdamW", "params": {"weight_decay": decay}} for decay in (0.0, 0.2)],
            3,
            "betas .0.9, 0.999., .*weight_decay 0.2",
        ),
        ("scheduler", [None, {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}], 1, "type='WarmupLR'"),
        ("fp16", [{"enabled": True, "loss_scale": scale} for scale in (64, 128)], 2, "loss_scale=128"),
        ("bf16", [{"enabled": True, "check_grad_overflow": checks} for checks in (True, False)], 1, "overflow=False"),
    ],
)
def test_numbers_of_a_step_that_differ_are_named(section, values, stage, found):
    first, last = run_ranks(2, keys_job, section, values, stage)
    name = "the optimizer's settings" if section == "optimizer" else section
    for message in (first, last):
        assert f"initialize: {name} must be the same on all ranks, and rank 1 differs from rank 0" in message
    assert re.search(found, last), last


def added_group_job():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})[0]
    with pytest.raises(ConfigError, match=r"the added group of parameters must be the same .*rank 1 differs"):
        engine.optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.1 * dist.get_rank()})
    engine.destroy()


def test_settings_of_an_added_group_that_differ_are_named():
    run_ranks(2, added_group_job)
