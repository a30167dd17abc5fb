"""Checkpoints of stage 3: loaded where other parameters are sharded, and what no optimizer trains."""

from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.engine import training_state
from deepspeed.errors import CheckpointError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero import GatheredParameters
from torch import Tensor, nn


class Net(nn.Module):
    """Trained and frozen layers of several sizes, a tied weight, a scale that the optimizer does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.rand(9))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.frozen(x)))
        return self.last(x) + self.tied(x) + self.scale.detach().sum()


def create_engine(threshold: int, seed: int, low: bool) -> Any:
    torch.manual_seed(seed)
    net = Net()
    trained = [param for name, param in net.named_parameters() if param.requires_grad and name != "scale"]
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": low}, "zero_optimization": zero}
    optimizer = torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:]}], lr=0.01)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(engine: Any) -> None:
    x = torch.linspace(-1, 1, 20).view(4, 5).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean())
    engine.step()


def weights(engine: Any) -> list[Tensor]:
    with GatheredParameters(engine.module.parameters()):
        return [param.detach().clone() for param in engine.module.parameters()]


def resume_job(folder: str, saved_threshold: int, threshold: int, low: bool) -> None:
    engine = create_engine(saved_threshold, 0, low)
    train(engine)
    engine.save_checkpoint(folder)
    saved = weights(engine)
    train(engine)
    finished = weights(engine)
    engine.destroy()
    resumed = create_engine(threshold, 1, low)
    resumed.load_checkpoint(folder)
    assert all(map(torch.equal, weights(resumed), saved))
    train(resumed)
    assert all(map(torch.equal, weights(resumed), finished))
    consolidated = get_fp32_state_dict_from_zero_checkpoint(folder)
    names = [name for name, _ in resumed.module.named_parameters()]
    dtype = saved[0].dtype
    assert all(torch.equal(consolidated[name].to(dtype), value) for name, value in zip(names, saved, strict=True))


@pytest.mark.parametrize(
    ("saved_threshold", "threshold", "low"),
    swept(
        [(0, 0, False), (0, 10, True), (0, 1000, False), (10, 0, True), (10, 22, False), (1000, 0, False)],
        lambda saved, threshold, low: (saved, threshold) in ((0, 10), (1000, 0)),
    ),
)
def test_a_checkpoint_loads_where_other_parameters_are_sharded(tmp_path, saved_threshold, threshold, low):
    run_ranks(2, resume_job, str(tmp_path), saved_threshold, threshold, low)


def new_head_job(folder: str, stage: int) -> None:
    """Weights of a trained body go into a model with another head, as fine-tuning begins."""

    def create(seed: int, *head: nn.Module) -> Any:
        torch.manual_seed(seed)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        return deepspeed.initialize(model=nn.Sequential(nn.Linear(5, 7), *head), config=config)[0]

    engine = create(0)
    train(engine)
    engine.save_checkpoint(folder)
    body = weights(engine)
    engine.destroy()
    engine = create(1, nn.Linear(7, 3))
    before = weights(engine)
    with pytest.raises(CheckpointError, match=r"1\.(weight|bias)"):
        engine.load_checkpoint(folder, load_module_only=True)
    with pytest.raises(CheckpointError, match=r"optimizer state: found none of the parameter 1\.weight, which this"):
        engine.load_checkpoint(folder, load_module_strict=False)
    assert all(torch.equal(one, other) for one, other in zip(weights(engine), before, strict=True))
    engine.load_checkpoint(folder, load_module_strict=False, load_module_only=True)
    assert all(torch.equal(one, other) for one, other in zip(weights(engine), [*body, *before[2:]], strict=True))
    train(engine)
    assert not any(torch.equal(one, other) for one, other in zip(weights(engine), [*body, *before[2:]], strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_go_into_a_model_with_a_new_head(tmp_path: Any, stage: int) -> None:
    run_ranks(2, new_head_job, str(tmp_path), stage)


def custom_load_job(folder: str) -> list[str]:
    """What was said of a function that doubles whole weights; sharded ones it does not get."""

    def load(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value * 2 for name, value in src.items()})

    engine = create_engine(10, 0, low=False)
    train(engine)
    engine.save_checkpoint(folder)
    whole = [param.ds_numel <= 10 for param in engine.module.parameters()]
    saved = weights(engine)
    said: list[str] = []
    with mock.patch.object(training_state, "warn_once", said.append):
        engine.load_checkpoint(folder, custom_load_fn=load)
    for value, before, is_whole in zip(weights(engine), saved, whole, strict=True):
        assert torch.equal(value, 2 * before if is_whole else before)
    train(engine)
    for value, before, is_whole in zip(weights(engine), saved, whole, strict=True):
        torch.testing.assert_close(value, 2 * before if is_whole else before, atol=0.05, rtol=0)
    return said


def test_a_custom_load_fn_changes_what_is_whole(tmp_path: Path) -> None:
    for said in run_ranks(2, custom_load_job, str(tmp_path)):
        assert len(said) == 1
        assert "got no values of 2 sharded parameters, such as frozen.weight" in said[0]
