"""Two stages on two simulated devices: the losses of the cpu accelerator, in each schedule."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn


class Block(nn.Module):
    """(hidden, mask) -> (hidden, mask), with a mask that has no gradient."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs):
        hidden, mask = inputs
        return hidden + torch.tanh(self.linear(hidden)) * mask.unsqueeze(-1), mask


def embed(embedding, tokens):
    return embedding(tokens), tokens > 1


def logits(embedding, inputs):
    return inputs[0] @ embedding.weight.T


def loss_fn(outputs, labels):
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def train_job(stage, schedule, keys):
    layers = [
        TiedLayerSpec("embed", nn.Embedding, 9, 6, forward_fn=embed),
        *(LayerSpec(Block, 6) for _ in range(4)),
        TiedLayerSpec("embed", nn.Embedding, 9, 6, forward_fn=logits),
    ]
    interleave = 2 if schedule == "interleaved" else 1
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, seed_layers=True, interleave=interleave)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline": {"schedule": schedule},
        **keys,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    device = get_accelerator().device_name().partition(":")[0]
    assert all(param.device.type == device for param in engine.module.parameters())
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 9, (2, 5), generator=generator) for _ in range(4)]
    losses = [engine.train_batch(iter([(each, each) for each in tokens])).item() for _ in range(5)]
    losses.append(engine.eval_batch(iter([(each, each) for each in tokens])).item())
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("stage", "schedule", "keys"),
    [
        (1, "1f1b", {}),
        (2, "zero_bubble", {}),
        pytest.param(3, "1f1b", {"bf16": {"enabled": True}}, marks=pytest.mark.sweep),
        pytest.param(0, "interleaved", {}, marks=pytest.mark.sweep),
    ],
)
def test_losses_are_those_of_the_host(sim_ranks, cpu_ranks, stage, schedule, keys):
    found, wanted = (ranks(train_job, stage, schedule, keys) for ranks in (sim_ranks, cpu_ranks))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(wanted[0], rel=1e-2 if keys else 1e-5)
    assert found[0][-1] < found[0][0]
