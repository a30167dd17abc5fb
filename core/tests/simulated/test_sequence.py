"""Divided sequences on a device: Ulysses, the ring, the mean loss and steps of stage 3, beside whole ones."""

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.parallel import groups
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.sequence.ring import RingAttention
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, WIDTH = 8, 3, 4


def attend(q, k, v):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Model(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(6, 3 * HEADS * WIDTH)
        self.attention = attention

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, WIDTH)).unbind(2)
        return self.attention(q, k, v).square().mean()


def ring(group):
    attention = RingAttention(group)
    return lambda q, k, v: attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)


def train_job(kind):
    """Losses of two steps on this rank's tokens, and the weights."""
    mesh = groups.set_mesh({"sp": 2})
    group = mesh.group("sp")
    attention = DistributedAttention(attend, group, 2, 1) if kind == "ulysses" else ring(group)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=Model(attention), config=config)
    whole = torch.randn(2, TOKENS, 6, generator=torch.Generator().manual_seed(1))
    own = whole.chunk(2, 1)[dist.get_rank()].to(engine.device)
    losses = []
    for _ in range(2):
        loss = mean_over_sequence(engine(own), TOKENS // 2, group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weight = engine.module.qkv.weight.detach().cpu().clone()
    engine.destroy()
    return losses, weight


def plain():
    model, losses = Model(attend), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    whole = torch.randn(2, TOKENS, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        loss = model(whole)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.qkv.weight.detach()


def check(ranks):
    expected_losses, expected = plain()
    for kind in ("ulysses", "ring"):
        for losses, weight in ranks(train_job, kind):
            assert torch.allclose(torch.tensor(losses), torch.tensor(expected_losses), rtol=0, atol=1e-6)
            assert torch.allclose(weight, expected, rtol=0, atol=1e-6)


def test_steps_equal_those_on_whole_sequences(sim_ranks):
    check(sim_ranks)
