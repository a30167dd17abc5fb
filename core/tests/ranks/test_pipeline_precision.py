"""Pipelines in bf16: bit for bit what plain torch computes on one rank, with fp32 master weights.

Both do the same arithmetic: activations and gradients cross stages as they are, and the gradients of micro-batches are
added in bf16.
"""

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.testing.distributed import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
STEPS, MICROS, MICRO_BATCH, LR, SEED = 20, 4, 2, 0.1, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def layers():
    blocks = [LayerSpec(Block) for _ in range(4)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def loss_fn(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS * MICROS):
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH), generator=generator)
        yield tokens, tokens.roll(1, 1)


def train_job(stages, stage, schedule):
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICROS,
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline": {"schedule": schedule},
    }
    keys = {"interleave": 2} if schedule == "interleaved" else {}
    model = PipelineModule(
        layers(),
        num_stages=stages,
        loss_fn=loss_fn,
        seed_layers=True,
        base_seed=SEED,
        partition_method="uniform",
        **keys,
    )
    engine = deepspeed.initialize(model=model, config=config)[0]
    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    engine.destroy()
    return losses, {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def reference():
    """Losses, and weights by the names of PipelineModule."""
    modules = []
    for index, spec in enumerate(layers()):
        torch.manual_seed(SEED + index)
        modules.append(spec.build())
    model = nn.Sequential(*modules)
    masters = [param.detach().clone() for param in model.parameters()]
    model = model.bfloat16()
    data, losses = batches(), []
    for _ in range(STEPS):
        found = []
        for _ in range(MICROS):
            tokens, labels = next(data)
            loss = loss_fn(model(tokens), labels)
            (loss / MICROS).backward()
            found.append(loss.detach().float())
        losses.append(torch.stack(found).mean().item())
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master.add_(param.grad.float(), alpha=-LR))
                param.grad = None
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("stages", "stage", "schedule"),
    [
        (2, 1, "zero_bubble"),
        (3, 3, "1f1b"),
        pytest.param(2, 0, "1f1b", marks=pytest.mark.sweep),
        pytest.param(2, 2, "interleaved", marks=pytest.mark.sweep),
        pytest.param(3, 2, "zero_bubble", marks=pytest.mark.sweep),
    ],
)
def test_bf16_stages_compute_what_one_rank_does(stages, stage, schedule):
    losses, weights = reference()
    for own_losses, own in run_ranks(stages, train_job, stages, stage, schedule):
        assert own_losses == losses
        for name, weight in own.items():
            assert torch.equal(weight, weights[name]), name
