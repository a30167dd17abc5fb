"""Checkpoints of a device: with and without offload, loaded at other stages and numbers of ranks."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
# stage 0 shards no optimizer states, and so offloads none
MIXES = [(0, False), *product((1, 2, 3), (False, True))]
PAIRS = list(product(MIXES, MIXES))


def create_engine(stage, offloads, seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    section = {"stage3_param_persistence_threshold": 10, **(OFFLOAD if offloads else {})}
    return make_engine(
        net,
        stage,
        optimizer={"type": "AdamW", "params": {"lr": 0.02}},
        zero_optimization=section,
        bf16={"enabled": True},
    )


def states(engine):
    """Whole master weights and moments."""
    values = []
    for param in engine.module.parameters():
        values.append(safe_get_full_fp32_param(param).cpu().clone())
        values += [safe_get_full_optimizer_state(param, name).cpu().clone() for name in ("exp_avg", "exp_avg_sq")]
    return values


def step(engine):
    x = torch.linspace(-1, 1, 20).view(4, 5).to(engine.device, torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()


def save_all(folder):
    """Every mix after two steps; its states."""
    saved = {}
    for mix in MIXES:
        engine = create_engine(*mix)
        for _ in range(2):
            step(engine)
        engine.save_checkpoint(str(Path(folder) / f"{dist.get_world_size()}-{mix}"))
        saved[mix] = states(engine)
        engine.destroy()
    return saved


def load_pairs(folder, world_size, pairs, saved):
    for source, target in pairs:
        engine = create_engine(*target, seed=1)
        engine.load_checkpoint(str(Path(folder) / f"{world_size}-{source}"))
        assert all(map(torch.equal, states(engine), saved[source])), (source, target)
        step(engine)
        assert engine.global_steps == 3
        engine.destroy()


@pytest.mark.parametrize("part", swept(range(8), lambda part: part == 3))
@pytest.mark.parametrize("saves_alone", [True, False])
def test_a_checkpoint_loads_with_and_without_offload(sim, sim_ranks, tmp_path, saves_alone, part):
    """One rank saves and two load, and the other way round."""
    save, load = (sim, sim_ranks) if saves_alone else (sim_ranks, sim)
    saved = save(save_all, str(tmp_path))[0]
    load(load_pairs, str(tmp_path), 1 if saves_alone else 2, PAIRS[part::8], saved)
