"""Training: the losses of ZeRO 0, 1 and 2 on the device equal the losses of plain torch on the host. Runs resume.

The tests train a GPT of 30 thousand parameters with AdamW, on two ranks if possible. The reference averages the
gradients of both ranks' data in one process, in fp32 on the host. Losses agree to 1e-4 in fp32 and to 5% in half
precision. The same seed must give the same bits for a model of linear layers and dropout. The model has no embedding,
because some devices sum the gradient of an embedding in a different order each time.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.testing import requirements
from deepspeed.testing.models import GPT, make_engine, tiny_gpt
from deepspeed.testing.suite import fixtures

_STEPS, _BATCH, _TIME, _VOCABULARY = 5, 4, 16, 64
_ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}

each_stage = pytest.mark.parametrize("stage", [0, 1, 2])


def _model() -> GPT:
    torch.manual_seed(0)
    return tiny_gpt(vocab_size=_VOCABULARY, sequence_length=_TIME)


def _batch(rank: int, step: int) -> torch.Tensor:
    """Return tokens with a pattern that the model can learn."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    start = torch.randint(_VOCABULARY, (_BATCH, 1), generator=generator)
    return (start + 3 * torch.arange(_TIME + 1)) % _VOCABULARY


def _reference(world_size: int) -> list[list[float]]:
    """Train in plain torch on the host, and return the losses by rank and step."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(_STEPS):
        for rank in range(world_size):
            tokens = _batch(rank, step)
            loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
            (loss / world_size).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _engine(stage: int, precision: str) -> Any:
    accelerator = get_accelerator()
    accelerator.set_device(dist.get_local_rank())
    return make_engine(
        _model(),
        stage,
        train_micro_batch_size_per_gpu=_BATCH,
        optimizer={"type": "AdamW", "params": {**_ADAMW, "betas": list(_ADAMW["betas"])}},
        zero_optimization={"reduce_bucket_size": 5000},
        **_PRECISIONS[precision],
    )


def _steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = _batch(dist.get_rank(), step).to(engine.device)
        loss = engine(tokens[:, :-1], tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(stage: int, precision: str) -> tuple[list[float], bool]:
    engine = _engine(stage, precision)
    losses = _steps(engine, 0, _STEPS)
    there = all(get_accelerator().on_accelerator(param) for param in engine.module.parameters())
    engine.destroy()
    return losses, there


@each_stage
@pytest.mark.parametrize("precision", list(_PRECISIONS))
def test_losses_are_those_of_plain_torch(stage: int, precision: str) -> None:
    requirements.dtype(_DTYPES[precision]).check()
    world_size = fixtures.most_ranks()
    wanted = _reference(world_size)
    for rank, (losses, there) in enumerate(fixtures.on_ranks(world_size, train, stage, precision)):
        assert there, "parameters are not on the accelerator"
        assert losses == pytest.approx(wanted[rank], rel=_TOLERANCE[precision])
        assert losses[-1] < losses[0]


def train_with_dropout(seed: int) -> list[bytes]:
    """Train a model with dropout for three steps, and return the bytes of its weights."""
    accelerator = get_accelerator()
    accelerator.set_device(dist.get_local_rank())
    torch.manual_seed(0)
    layers = (torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8))
    engine = make_engine(torch.nn.Sequential(*layers), 2)
    accelerator.manual_seed(seed + dist.get_rank())
    for step in range(3):
        x = torch.randn(_BATCH, 16, generator=torch.Generator().manual_seed(step)).to(engine.device)
        engine.backward(engine(x).square().mean())
        engine.step()
    weights = [param.detach().cpu().numpy().tobytes() for param in engine.module.parameters()]
    engine.destroy()
    return weights


def test_the_same_seed_gives_the_same_bits() -> None:
    world_size = fixtures.most_ranks()
    first, again, other = (fixtures.on_ranks(world_size, train_with_dropout, seed) for seed in (7, 7, 8))
    assert first == again
    assert first[0] == first[-1]  # ranks have the same weights
    assert first != other


def save(folder: str, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = _engine(stage, "fp32")
    _steps(engine, 0, 2)
    weights = {name: value.detach().cpu().clone() for name, value in engine.module.named_parameters()}
    engine.save_checkpoint(folder, tag="two")
    losses = _steps(engine, 2, 4)
    engine.destroy()
    return losses, weights


def resume(folder: str, stage: int) -> list[float]:
    engine = _engine(stage, "fp32")
    engine.load_checkpoint(folder)
    losses = _steps(engine, 2, 4)
    engine.destroy()
    return losses


@each_stage
def test_a_checkpoint_is_resumed_as_if_nothing_had_been(stage: int, tmp_path: Path) -> None:
    world_size = fixtures.most_ranks()
    saved = fixtures.on_ranks(world_size, save, str(tmp_path), stage)
    resumed = fixtures.on_ranks(world_size, resume, str(tmp_path), stage)
    for losses, (wanted, _) in zip(resumed, saved, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)  # some devices add in a different order each time


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_of_a_checkpoint_are_read_on_the_host(stage: int, tmp_path: Path) -> None:
    (_, weights), *_ = fixtures.on_ranks(fixtures.most_ranks(), save, str(tmp_path), stage)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
