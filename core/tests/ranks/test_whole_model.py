"""Whole weights out of a model that is divided over ranks: `save_16bit_model` and what Accelerate calls."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
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


class Scaled(torch.nn.Linear):
    """An expert with a buffer that differs between experts."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("scale", torch.rand(()))


EXPERTS = {"copies": linear_expert, "stacked": stacked_expert, "buffers": Scaled}


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
        check_storages(found, module)
    engine.destroy()


def check_storages(weights, module):
    """Each weight has a storage of its own: safetensors keeps one name of each, and a later step changes none."""
    tensors = {id(value): value for value in weights.values()}.values()
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}
    assert len(storages) == len(tensors)
    assert sum(storages.values()) == sum(value.nbytes for value in tensors)
    assert not storages.keys() & {param.untyped_storage().data_ptr() for param in module.parameters()}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("model", ["tp", *EXPERTS])
def test_whole_weights_of_a_divided_model(tmp_path, model, stage):
    run_ranks(2, save_job, tmp_path, model, stage)
    whole = Divided() if model == "tp" else mixture(EXPERTS[model], 1)
    before = copy.deepcopy(whole.state_dict())
    whole.load_state_dict(torch.load(tmp_path / "weights.bin"), strict=True)
    after = whole.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def tied_job(stage):
    """Small weights are whole at stage 3 too, in one flat tensor."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    engine = deepspeed.initialize(model=module, config=config_of(stage))[0]
    found = [engine._consolidated_16bit_state_dict()]
    if stage == 3 and deepspeed.comm.get_rank() == 0:
        found.append(engine._zero3_consolidated_16bit_state_dict())
    elif stage == 3:
        assert engine._zero3_consolidated_16bit_state_dict() is None
    for weights in found:
        assert weights["1.weight"] is weights["0.weight"]
        check_storages(weights, module)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_weights_have_storages_of_their_own(stage):
    run_ranks(2, tied_job, stage)
