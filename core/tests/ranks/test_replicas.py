"""`zero_optimization.enable_sanity_checks`: what several ranks hold whole is compared before each update."""

import pytest
import torch
from deepspeed.errors import StateError
from deepspeed.moe.layer import MoE
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.engines import make_engine
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2)

    def forward(self, x):
        return self.moe(self.first(x))[0]


def train(stage, edited, checks=True, bf16=False, experts=False):
    """What two steps raise on this rank; between them rank 1 alone edits the parameter `edited`."""
    torch.manual_seed(0)
    net = Experts() if experts else nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    keys = {"zero_optimization": {"enable_sanity_checks": checks, "stage3_param_persistence_threshold": 100}}
    engine = make_engine(net, stage, bf16={"enabled": bf16}, **keys)
    raised = None
    for step in range(3):
        x = torch.ones(4, 8, dtype=torch.bfloat16 if bf16 else None)
        engine.backward(engine(x).float().square().mean())
        if step == 1 and edited and engine.global_rank == 1:
            with torch.no_grad():
                dict(engine.module.named_parameters())[edited].view(-1)[3].add_(0.25)
        try:
            engine.step()
        except StateError as error:
            raised = str(error)
            break
    engine.destroy()
    return raised


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_one_rank_changed_ends_all_ranks(stage):
    for raised in run_ranks(2, train, stage, "1.bias", True, stage == 2):
        assert "enable_sanity_checks: the parameter 1.bias must have the same values" in raised
        assert "and rank 1 differs from rank 0" in raised


def test_without_the_key_nothing_is_compared():
    assert run_ranks(2, train, 1, "1.bias", False) == [None, None]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_equal_ranks_pass_with_experts_and_sharded_parameters(stage):
    assert run_ranks(2, train, stage, None, True, False, stage < 3) == [None, None]
