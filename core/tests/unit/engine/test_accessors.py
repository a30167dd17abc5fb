"""The table of getters: each is a method of the engine and gives the right answer."""

import pytest
import torch
from deepspeed.engine.accessors import ATTRIBUTES, FROM_CONFIG, FROM_ENGINE, NOT_HERE
from torch import nn

CONFIG = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.7,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "steps_per_print": 50,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "fp16": {"enabled": True, "initial_scale_power": 5, "auto_cast": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 1000,
        "reduce_bucket_size": 2000,
        "overlap_comm": True,
    },
}

ANSWERS = {
    "amp_enabled": False,
    "bfloat16_enabled": False,
    "dump_state": False,
    "dynamic_loss_scale": True,
    "fp16_auto_cast": True,
    "fp16_enabled": True,
    "get_batch_info": (6, 2, 3),
    "get_global_grad_norm": None,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.7,
    "gradient_predivide_factor": 2.0,
    "initial_scale_power": 5,
    "is_gradient_accumulation_boundary": False,
    "loss_scale": 32.0,
    "optimizer_name": "AdamW",
    "optimizer_params": {"lr": 0.5},
    "postscale_gradients": False,
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 4},
    "sparse_gradients_enabled": False,
    "steps_per_print": 50,
    "torch_autocast_enabled": False,
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 2,
    "memory_breakdown": False,
    "wall_clock_breakdown": False,
    "was_step_applied": False,
    "zero_allgather_bucket_size": 1000,
    "zero_allgather_partitions": True,
    "zero_allow_untested_optimizer": False,
    "zero_contiguous_gradients": True,
    "zero_force_ds_cpu_optimizer": True,
    "zero_gather_16bit_weights_on_model_save": False,
    "zero_ignore_unused_parameters": True,
    "zero_optimization": True,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": False,
    "zero_optimization_stage": 2,
    "zero_overlap_comm": True,
    "zero_reduce_bucket_size": 2000,
    "zero_reduce_scatter": True,
    "zero_sub_group_size": 1_000_000_000,
}


def test_the_answers_here_are_all_of_the_table():
    assert set(ANSWERS) == {*FROM_CONFIG, *FROM_ENGINE}
    tables = [FROM_CONFIG, FROM_ENGINE, ATTRIBUTES, NOT_HERE]
    assert len({name for table in tables for name in table}) == sum(map(len, tables))


def test_every_getter_answers(make_engine):
    engine = make_engine(nn.Linear(4, 2), **CONFIG)
    assert {name: getattr(engine, name)() for name in ANSWERS} == ANSWERS


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_questions_about_the_stage(make_engine, stage):
    engine = make_engine(nn.Linear(4, 2), zero_optimization={"stage": stage})
    assert engine.zero_optimization_stage() == stage
    assert engine.zero_optimization() is (stage > 0)
    assert engine.zero_optimization_partition_gradients() is (stage == 2)


def test_what_a_step_leaves_behind(make_engine):
    engine = make_engine(nn.Linear(4, 2), train_batch_size=1)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.was_step_applied() is True
    assert engine.get_global_grad_norm() == pytest.approx(10**0.5)
    assert engine.is_gradient_accumulation_boundary() is True


def test_they_have_names_and_docstrings(make_engine):
    assert make_engine(nn.Linear(4, 2)).train_batch_size.__name__ == "train_batch_size"
    assert "gradient_clipping" in make_engine(nn.Linear(4, 2)).gradient_clipping.__doc__


def test_attributes(make_engine, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    data = [1, 2]
    engine = make_engine(nn.Linear(4, 2), arguments={"training_data": data})
    found = {name: getattr(engine, name) for name in ATTRIBUTES}
    assert found == {
        "client_lr_scheduler": None,
        "client_optimizer": None,
        "communication_data_type": torch.float32,
        "dp_world_size": 1,
        "global_rank": 0,
        "local_rank": 0,
        "mp_world_size": 1,
        "mpu": None,
        "training_data": data,
        "world_size": 1,
    }


def test_attributes_are_what_initialize_was_given(make_engine):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    engine = make_engine(model, arguments={"optimizer": optimizer, "lr_scheduler": schedule})
    assert engine.client_optimizer is optimizer
    assert engine.client_lr_scheduler is schedule
    engine.destroy()
    assert engine.client_optimizer is None


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, torch.float32),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, torch.float16),
    ],
)
def test_the_dtype_of_exchanged_gradients(make_engine, keys, dtype):
    assert make_engine(nn.Linear(4, 2), **keys).communication_data_type == dtype


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_documented_elsewhere_and_not_here(make_engine, name):
    engine = make_engine(nn.Linear(4, 2))
    with pytest.raises(AttributeError, match=rf"^{name}: .* not in this version; ."):
        getattr(engine, name)
    engine.module.register_buffer(name, torch.ones(1), persistent=False)
    assert torch.equal(getattr(engine, name), torch.ones(1)), "the module's own comes first"
