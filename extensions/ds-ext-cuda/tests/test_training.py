"""ZeRO 0 to 3 over nccl against plain torch on one card, on one card and on all there are.

Without a GPU one case runs on two CPU ranks, so that this file does what it says when there is one.
"""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import GPT, GPTConfig
from torch.optim.optimizer import register_optimizer_step_post_hook

NUM_CARDS = torch.cuda.device_count()
DEVICE = "cuda" if NUM_CARDS else "cpu"
NUM_STEPS, BATCH, LEARNING_RATE = 6, 4, 1e-3
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


def is_supported(stage):
    """Whether this version trains with the stage."""
    try:
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": stage}}, world_size=1).check_supported()
    except ConfigError:
        return False
    return True


STAGES = [stage for stage in range(4) if is_supported(stage)] if NUM_CARDS else [2]
WORLDS = sorted({1, NUM_CARDS}) if NUM_CARDS else [2]


def build_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(width=256, sequence_length=32) if NUM_CARDS else GPTConfig(width=32, sequence_length=16))


def batches(rank):
    """Tokens and targets of every step, on the host."""
    generator = torch.Generator().manual_seed(1 + rank)
    length = build_model().config.sequence_length
    tokens = torch.randint(256, (NUM_STEPS, BATCH, length + 1), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def train_engine(stage, precision):
    """The losses of this rank."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": 0.0,
    }
    engine = deepspeed.initialize(model=build_model(), config=config)[0]
    assert engine.device.type == DEVICE
    losses = []
    for tokens, targets in batches(dist.get_rank()):
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def train_torch(world_size):
    """The losses of every rank in fp32, by one process that averages the gradients of all their batches."""
    model = build_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = [[] for _ in range(world_size)]
    for step in zip(*(batches(rank) for rank in range(world_size)), strict=True):
        for rank, (tokens, targets) in enumerate(step):
            loss = model(tokens.to(DEVICE), targets.to(DEVICE))
            (loss / world_size).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"] if NUM_CARDS else ["fp32"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_losses_are_those_of_plain_torch(world_size, stage, precision):
    found = run_ranks(world_size, train_engine, stage, precision, environment={"DS_ACCELERATOR": DEVICE})
    for losses, expected in zip(found, train_torch(world_size), strict=True):
        assert losses == pytest.approx(expected, rel=TOLERANCE[precision])


def train_in_calls(stage):
    """Calls of the optimizer in each step of a bf16 model that is built on the host."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
        "bf16": {"enabled": True},
    }
    engine = deepspeed.initialize(model=build_model(), config=config)[0]
    counts = []
    for tokens, targets in batches(dist.get_rank())[:2]:
        engine.backward(engine(tokens.to(engine.device), targets.to(engine.device)))
        calls = []
        handle = register_optimizer_step_post_hook(lambda *_, calls=calls: calls.append(1))
        engine.step()
        handle.remove()
        counts.append(len(calls))
    engine.destroy()
    return counts


@pytest.mark.parametrize("stage", STAGES)
def test_one_call_updates_every_parameter(stage):
    for counts in run_ranks(WORLDS[-1], train_in_calls, stage, environment={"DS_ACCELERATOR": DEVICE}):
        assert counts == [1, 1]
