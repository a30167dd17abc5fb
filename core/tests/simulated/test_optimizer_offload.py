"""`offload_optimizer` on devices with memory of their own: batches of the update that hold several groups and units."""

import functools

import pytest
import torch
from deepspeed.ops import adam
from deepspeed.testing.models import make_engine

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def train(shapes, rates, stage, precision, section):
    """Losses of linear layers, each in an optimizer group of its own where there are several `rates`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(*shape, bias=False) for shape in shapes))

    def optimizer(params):
        groups = [{"params": [param], "lr": lr} for param, lr in zip(params, rates, strict=False)]
        return torch.optim.AdamW(groups if rates else params, lr=0.01)

    engine = make_engine(
        model,
        stage,
        optimizer=None,
        zero_force_ds_cpu_optimizer=False,
        zero_optimization={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**8, **section},
        arguments={"optimizer": optimizer},
        **PRECISIONS[precision],
    )
    x = torch.randn(4, shapes[0][0]).to(engine.device, next(model.parameters()).dtype)
    losses = []
    for _ in range(4):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def train_at_stage_0(kind, section):
    """Losses of an optimizer of `deepspeed.ops.adam`, as DeepSpeed-Chat's scripts give it."""
    torch.manual_seed(0)
    arguments = {"optimizer": functools.partial(getattr(adam, kind), lr=0.01)}
    engine = make_engine(torch.nn.Linear(4, 3), optimizer=None, zero_optimization=section, arguments=arguments)
    x = torch.ones(4, 4, device=engine.device)
    losses = []
    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("kind", ["DeepSpeedCPUAdam", "FusedAdam"])
def test_at_stage_0_the_section_changes_nothing(sim, kind):
    losses = sim(train_at_stage_0, kind, OFFLOAD)
    assert losses == sim(train_at_stage_0, kind, {})
    assert losses[0] == sorted(losses)[-1]


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_that_are_updated_together_keep_their_weights(sim, stage):
    arguments = [(4, 4)] * 4, (0.01, 0.02, 0.03, 0.04), stage, "bf16"
    assert sim(train, *arguments, OFFLOAD) == sim(train, *arguments, {})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_units_whose_fragments_have_adjoining_offsets_are_apart(sim_ranks, precision):
    # of the second rank: elements 50 to 100 of the first unit, and 100 to 200 of the second
    arguments = [(10, 10), (10, 20)], (), 3, precision
    assert sim_ranks(train, *arguments, OFFLOAD) == sim_ranks(train, *arguments, {})
