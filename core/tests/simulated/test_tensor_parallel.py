"""A model divided over two simulated devices: losses of the cpu accelerator, and dropout that agrees where it must."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.parallel.model_part import part_held
from deepspeed.testing.models import make_engine
from torch import nn

WIDTH, HEADS, SIZE = 8, 3, 4


class Model(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=HEADS)
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self.attention, name, nn.Linear(WIDTH, HEADS * SIZE))
        self.attention.o_proj = nn.Linear(HEADS * SIZE, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))
        self.inside, self.outside = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x):
        x = self.inputs(x)
        of = self.attention
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (of.q_proj, of.k_proj, of.v_proj))
        weights = F.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1)
        y = (self.inside(weights) @ v).transpose(1, 2).flatten(2)
        x = x + self.outside(of.o_proj(y))
        return (x + self.outside(self.mlp(x))).float().square().mean()


def train_job(stage, rate, precision):
    torch.manual_seed(0)
    engine = make_engine(
        Model(rate),
        stage,
        gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
        tensor_parallel={"autotp_size": 2},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    losses, norms = [], []
    for step in range(6):
        x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = engine(x.to(get_accelerator().current_device_name(), dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    whole = [param.detach().float().cpu() for param in engine.module.parameters() if part_held(param) is None]
    divided = sum(part_held(param) is not None for param in engine.module.parameters())
    engine.destroy()
    return losses, norms, whole, divided


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16")])
def test_two_devices_that_share_a_model_learn_what_two_hosts_learn(stage, precision, sim_ranks, cpu_ranks):
    first, second = sim_ranks(train_job, stage, 0.0, precision)
    expected = cpu_ranks(train_job, stage, 0.0, precision)[0]
    assert first[:2] == second[:2]
    assert first[3] == 10
    rel = 1e-5 if precision == "fp32" else 2e-2
    assert first[0] == pytest.approx(expected[0], rel=rel)
    assert first[1] == pytest.approx(expected[1], rel=rel)


def test_dropout_on_a_device_agrees_outside_of_divided_blocks(sim_ranks):
    first, second = sim_ranks(train_job, 0, 0.5, "fp32")
    assert first[0] == second[0]
    assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))
