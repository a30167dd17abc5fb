"""What initialize and load_checkpoint cannot do is refused with a reason, before anything is changed."""

import deepspeed
import pytest
import torch
from deepspeed.errors import CheckpointError, ConfigError, StateError

ADAM = {"type": "AdamW", "params": {"lr": 0.1}}


def test_gradients_are_not_rounded_below_fp32_parameters(single_rank, make_engine):
    with pytest.raises(ConfigError, match=r"data_types.grad_accum_dtype: found 'bf16' with fp32 parameters"):
        make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, data_types={"grad_accum_dtype": "bf16"})


@pytest.mark.parametrize("name", ["model", "sequence"])
def test_parallel_layouts_that_are_not_there(single_rank, name):
    class Mpu:
        def get_data_parallel_group(self):
            return torch.distributed.group.WORLD

        def get_data_parallel_world_size(self):
            return 1

        def get_data_parallel_rank(self):
            return 0

    setattr(Mpu, f"get_{name}_parallel_world_size", lambda self: 2)
    with pytest.raises(ConfigError, match=f"mpu asks for 2 {name}-parallel ranks"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), mpu=Mpu(), config={"train_batch_size": 1})


def test_parameters_of_another_model(single_rank, make_engine):
    other = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(ConfigError, match="is not in the model given to initialize"):
        make_engine(torch.nn.Linear(2, 1), arguments={"optimizer": optimizer})


def test_a_second_backward_past_the_outputs(single_rank, make_engine):
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=ADAM)
    engine(torch.ones(1, 2)).sum().backward()
    assert engine.module.weight.grad is not None
    with pytest.raises(StateError, match="second backward before step"):
        sum(param.square().sum() for param in engine.module.parameters()).backward()


def test_zero_grad_of_the_users_optimizer_reaches_the_buckets(single_rank, make_engine):
    torch.manual_seed(0)
    engine = make_engine(torch.nn.Linear(2, 1), optimizer={"type": "SGD", "params": {"lr": 1.0}})
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.full((1, 2), 100.0)).sum())
    engine.optimizer.zero_grad()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    torch.testing.assert_close(engine.module.weight, before - 1.0)


@pytest.mark.parametrize(("saved", "loading"), [({}, {"bf16": {"enabled": True}}), ({"bf16": {"enabled": True}}, {})])
def test_an_optimizer_state_of_another_precision(single_rank, make_engine, tmp_path, saved, loading):
    make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, **saved).save_checkpoint(str(tmp_path))
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, **loading)
    before = engine.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match="use the same precision"):
        engine.load_checkpoint(str(tmp_path))
    assert torch.equal(engine.module.weight, before)


def test_a_constant_scale_survives_a_checkpoint_of_a_dynamic_one(single_rank, make_engine, tmp_path):
    dynamic = {"enabled": True, "initial_scale_power": 4}
    make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, fp16=dynamic).save_checkpoint(str(tmp_path))
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, fp16={"enabled": True, "loss_scale": 8})
    engine.load_checkpoint(str(tmp_path))
    assert engine.loss_scale() == 8


def test_a_refused_group_leaves_the_engine_training(single_rank, make_engine):
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, zero_optimization={"stage": 1})
    with pytest.raises(ConfigError, match="is in two groups"):
        engine.optimizer.add_param_group({"params": [engine.module.weight]})
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert not torch.equal(engine.module.weight, before)
