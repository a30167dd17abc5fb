"""Whole weights out of a model that is divided over ranks: `save_16bit_model` and what Accelerate calls."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.stacked import ExpertMLP
from deepspeed.testing.distributed import run_ranks

from .test_resume_other_mesh import Divided


def config_of(stage, **keys):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 8,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **keys,
    }


def mixture(expert, ep_size):
    torch.manual_seed(5)
    return torch.nn.ModuleDict({"moe": MoE(8, expert, 4, ep_size=ep_size), "head": torch.nn.Linear(8, 2)})


def linear_expert():
    return torch.nn.Linear(8, 8)


def stacked_expert():
    return ExpertMLP(8, 16)


EXPERTS = {"copies": linear_expert, "stacked": stacked_expert}


def save_job(folder, model, stage):
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    module = Divided(rank % 2, 2) if model == "tp" else mixture(EXPERTS[model], 2)
    keys = {"mesh": {"tp": 2}} if model == "tp" else {}
    engine = deepspeed.initialize(model=module, config=config_of(stage, **keys))[0]
    assert engine.save_16bit_model(folder, "weights.bin") is True
    everywhere = engine._consolidated_16bit_state_dict()
    on_first = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else None
    assert (on_first is not None) == (stage == 3 and rank == 0)
    for found in filter(None, (everywhere, on_first)):
        assert all(torch.equal(found[name], value) for name, value in torch.load(folder / "weights.bin").items())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", ["tp", "copies", "stacked"])
def test_whole_weights_of_a_divided_model(tmp_path, model, stage):
    run_ranks(2, save_job, tmp_path, model, stage)
    whole = Divided() if model == "tp" else mixture(EXPERTS[model], 1)
    before = copy.deepcopy(whole.state_dict())
    whole.load_state_dict(torch.load(tmp_path / "weights.bin"), strict=True)
    after = whole.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
