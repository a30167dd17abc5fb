"""Norm, clipping and the skip of an fp16 step where the caller divided the model over tensor-parallel ranks."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.testing.distributed import run_ranks

NUMEL, TP, DP = 8, 2, 2
LR, CLIP = 1.0, 0.5


class Whole(torch.nn.Module):
    """loss = w . x + b * x[0]; `part` of `parts` is the slice of w that this rank holds, b is on every rank."""

    def __init__(self, part=0, parts=1):
        super().__init__()
        self.cut = slice(part * NUMEL // parts, (part + 1) * NUMEL // parts)
        self.w = torch.nn.Parameter(torch.arange(float(NUMEL))[self.cut].clone())
        self.w.tensor_model_parallel = True  # the mark of Megatron's layers
        self.b = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.w * x[self.cut]).sum() + (self.b * x[0]).sum()


def sample(dp_rank):
    return torch.linspace(0.1, 1.0, NUMEL) * (dp_rank + 1)


def reference():
    """Norm and weights of the whole model after one clipped step of plain SGD."""
    model = Whole()
    (sum(model(sample(rank)) for rank in range(DP)) / DP).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return norm.item(), model.w.detach().clone(), model.b.detach().clone()


def create(stage, **keys):
    tp_rank = dist.get_rank() % TP
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    return deepspeed.initialize(model=Whole(tp_rank, TP), config=config, mesh_param={"dp": DP, "tp": TP})[0]


def train_job(stage):
    engine = create(stage, gradient_clipping=CLIP)
    engine.backward(engine(sample(engine.mesh.rank("dp"))))
    engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, engine.module.cut, engine.module.w.detach().clone(), engine.module.b.detach().clone()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_and_the_clipped_step_are_those_of_the_whole_model(stage):
    norm, w, b = reference()
    for found, cut, part, bias in run_ranks(TP * DP, train_job, stage):
        assert found == pytest.approx(norm, rel=1e-6)
        assert torch.allclose(part, w[cut], rtol=1e-6)
        assert torch.allclose(bias, b, rtol=1e-6)


def overflow_job(stage):
    engine = create(stage, fp16={"enabled": True, "initial_scale_power": 8})
    x = sample(engine.mesh.rank("dp")).half()
    if dist.get_rank() == 1:  # one part of one copy of the model
        x[-1] = float("inf")
    engine.backward(engine(x))
    engine.step()
    skipped = engine.skipped_steps
    engine.destroy()
    return skipped


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_skip_the_step_in_which_one_overflows(stage):
    assert run_ranks(TP * DP, overflow_job, stage) == [1] * (TP * DP)
