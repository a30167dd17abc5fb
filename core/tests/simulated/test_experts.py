"""Experts divided over two simulated devices compute what the cpu accelerator computes."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
from deepspeed.parallel import groups
from deepspeed.testing.models import make_engine
from torch import nn

WIDTH, NUM_STEPS = 8, 3


def single():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def stacked():
    return ExpertMLP(WIDTH, 2 * WIDTH, "silu", gated=True)


class Net(nn.Module):
    def __init__(self, make, **arguments):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(
            WIDTH, make, num_experts=4, ep_size=2, use_rts=False, top2_2nd_expert_sampling=False, **arguments
        )

    def forward(self, x):
        y, loss, _ = self.moe(self.first(x))
        return y.float().square().mean() + 0.1 * loss


def train(stage, make, arguments, keys):
    groups.set_mesh(None)
    engine = make_engine(Net(make, **arguments), stage, gradient_clipping=0.1, **keys)
    dtype = torch.bfloat16 if keys else torch.float32
    losses, norms = [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(NUM_STEPS):
        loss = engine(torch.randn(12, WIDTH, generator=generator).to(engine.device, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return losses, norms


CASES = {
    "dropping, stage 1": (1, single, {"k": 1, "capacity_factor": 0.7}, {}),
    "stacked, stage 3": (3, stacked, {"k": 2}, {}),
    "stacked, drop-less, bf16, stage 2": (2, stacked, {"k": 2, "drop_tokens": False}, {"bf16": {"enabled": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_host(case, sim_ranks, cpu_ranks):
    found, expected = sim_ranks(train, *CASES[case]), cpu_ranks(train, *CASES[case])
    rel = 1e-2 if "bf16" in case else 1e-5
    for own, other in zip(found, expected, strict=True):
        assert own[0] == pytest.approx(other[0], rel=rel)
        assert own[1] == pytest.approx(other[1], rel=rel)
