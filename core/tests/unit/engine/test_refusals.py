"""What initialize and load_checkpoint cannot do is refused with a reason, before anything is changed."""

import deepspeed
import pytest
import torch
from deepspeed.config.zero import ZeroConfig
from deepspeed.engine import sharding
from deepspeed.errors import CheckpointError, ConfigError, StateError
from deepspeed.parallel.layout import grid
from deepspeed.parallel.mesh import Mesh

ADAM = {"type": "AdamW", "params": {"lr": 0.1}}


def test_gradients_are_not_rounded_below_fp32_parameters(single_rank, make_engine):
    with pytest.raises(ConfigError, match=r"data_types.grad_accum_dtype: found 'bf16' with fp32 parameters"):
        make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, data_types={"grad_accum_dtype": "bf16"})


@pytest.mark.parametrize("name", ["model", "sequence"])
def test_an_mpu_without_the_groups_it_counts(single_rank, name):
    class Mpu:
        def get_data_parallel_group(self):
            return torch.distributed.group.WORLD

        def get_data_parallel_world_size(self):
            return 1

        def get_data_parallel_rank(self):
            return 0

    setattr(Mpu, f"get_{name}_parallel_world_size", lambda self: 2)
    with pytest.raises(ConfigError, match=rf"mpu: Mpu has no method get_{name}_parallel_group\(\)"):
        deepspeed.initialize(model=torch.nn.Linear(2, 1), mpu=Mpu(), config={"train_batch_size": 1})


def test_two_ways_to_copy_the_weights(single_rank):
    zero = ZeroConfig(stage=3, mics_shard_size=1, zero_hpz_partition_size=2)
    with pytest.raises(ConfigError, match="mics_shard_size 1 and zero_hpz_partition_size 2; .* give one of them"):
        sharding.split_data(Mesh(grid(dp=1)), zero)


def test_parameters_of_another_model(single_rank, make_engine):
    other = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(ConfigError, match="is not in the model given to initialize"):
        make_engine(torch.nn.Linear(2, 1), arguments={"optimizer": optimizer})


@pytest.mark.parametrize("stage", range(4))
def test_a_module_that_reduces_gradients_itself(single_rank, make_engine, stage):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))
    with pytest.raises(ConfigError, match=r"'1' of the model is a DistributedDataParallel, .*; pass the module inside"):
        make_engine(net, optimizer=ADAM, zero_optimization={"stage": stage})
    with pytest.raises(ConfigError, match=r"the model is a DistributedDataParallel, .*; pass the module inside"):
        make_engine(net[1], optimizer=ADAM, zero_optimization={"stage": stage})


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("stage", range(4))
def test_a_module_of_torchscript(single_rank, make_engine, stage):
    torch.manual_seed(0)
    keys = {"optimizer": ADAM, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    scripted = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"'1' of the model was made by torch\.jit, .*; pass the module that was"):
        make_engine(torch.nn.Sequential(torch.nn.Linear(2, 2), scripted), **keys)
    without = torch.jit.trace(torch.nn.Sequential(torch.nn.Tanh()), torch.ones(1, 2))
    engine = make_engine(torch.nn.Sequential(torch.nn.Linear(2, 2), without), **keys)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_twice_in_a_group(single_rank, make_engine, stage):
    net = torch.nn.Linear(2, 1)
    arguments = {"model_parameters": [*net.parameters(), net.weight]}
    with pytest.raises(ConfigError, match=r"param_groups\[0\]: a parameter of shape \(1, 2\) is in it twice; give"):
        make_engine(net, arguments=arguments, optimizer=ADAM, zero_optimization={"stage": stage})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_of_torch_s_optimizer(single_rank, make_engine, stage):
    net = torch.nn.Linear(2, 1)
    state = torch.optim.AdamW(net.parameters()).state_dict()
    engine = make_engine(net, optimizer=ADAM, zero_optimization={"stage": stage})
    for given, found in ((state, "state, param_groups"), ({}, "none")):
        with pytest.raises(CheckpointError, match=rf"^optimizer state: found the keys {found}, and .*state_dict\(\)"):
            engine.optimizer.load_state_dict(given)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


@pytest.mark.parametrize("stage", range(4))
def test_a_saved_state_of_steps_alone(single_rank, make_engine, tmp_path, stage):
    def build():
        torch.manual_seed(0)
        return make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, zero_optimization={"stage": stage})

    engine = build()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    for state in engine.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            del state[name]
    engine.save_checkpoint(tmp_path)
    loading = build()
    before = loading.module.weight.detach().clone()
    told = r"^optimizer state: found states \(step\) without exp_avg, exp_avg_sq, which"
    with pytest.raises(CheckpointError, match=told):
        loading.load_checkpoint(tmp_path)
    assert torch.equal(loading.module.weight, before)
    if stage > 0:  # else it is torch's own optimizer
        with pytest.raises(CheckpointError, match=told):
            loading.optimizer.load_state_dict(engine.optimizer.state_dict())


@pytest.mark.parametrize("stage", range(4))
def test_a_group_that_was_taken_out_of_the_optimizer(single_rank, make_engine, stage):
    net = torch.nn.Linear(2, 1)
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    arguments = {"model_parameters": groups}
    engine = make_engine(net, arguments=arguments, optimizer=ADAM, zero_optimization={"stage": stage})
    del engine.optimizer.param_groups[1]
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(StateError, match=r"param_groups: found 1 group, .* 2; .* set its lr to 0"):
        engine.step()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [({}, "in Linear; they"), ({"moe_layer_pattern": "x"}, "in Linear whose names match 'x'; they")],
)
def test_a_model_without_experts(single_rank, make_engine, pattern, message):
    with pytest.raises(ConfigError, match=f"^expert_parallel: found no experts {message} are modules"):
        make_engine(torch.nn.Linear(4, 2), expert_parallel={"enabled": True, **pattern})


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


def test_a_state_of_torch_without_names_loads_where_it_was_saved(single_rank, make_engine, tmp_path):
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=ADAM)
    engine.save_checkpoint(str(tmp_path), "t")
    path = tmp_path / "t" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    assert state["optimizer"].pop("param_names") == [["weight", "bias"]]
    torch.save(state, path)
    (tmp_path / "t" / "index.json").unlink()  # which those versions did not write
    engine.load_checkpoint(str(tmp_path))
    other = make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, bf16={"enabled": True})
    before = other.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"without the names of its parameters, as older versions wrote; load it"):
        other.load_checkpoint(str(tmp_path))
    assert torch.equal(other.module.weight, before)


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


FLAGS = [{}, {"load_optimizer_states": False}, {"load_module_only": True}]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_of_other_shapes_change_nothing(make_engine, tmp_path, stage, flags):
    keys = {"optimizer": ADAM, "zero_optimization": {"stage": stage}}
    make_engine(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)), **keys).save_checkpoint(tmp_path)
    engine = make_engine(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4)), **keys)
    before = [param.detach().clone() for param in engine.module.parameters()]
    found = r"1\.weight is \(3, 2\) there and \(4, 2\) in the model; 1\.bias"
    for strict in (True, False):  # neither takes them, so the message advises neither
        with pytest.raises(CheckpointError, match=rf"{found}.*; build the model of the save$"):
            engine.load_checkpoint(tmp_path, load_module_strict=strict, **flags)
    assert all(map(torch.equal, engine.module.parameters(), before))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("saved_stage", [0, 1])
@pytest.mark.parametrize("num_saved", [1, 3])
def test_names_of_one_side_are_left_out_as_the_messages_advise(make_engine, tmp_path, num_saved, saved_stage, stage):
    def create(num_layers, stage):
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(num_layers)))
        return make_engine(model, optimizer=ADAM, zero_optimization={"stage": stage})

    create(num_saved, saved_stage).save_checkpoint(tmp_path)
    engine = create(2, stage)
    with pytest.raises(CheckpointError, match="or say strict=False"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="or load with load_optimizer_states=False"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)[0]


def test_other_groups_are_left_out_as_the_message_advises(make_engine, tmp_path):
    def create(num_groups, stage):
        model = torch.nn.Linear(2, 2)
        params = (
            [{"params": [model.weight, model.bias]}]
            if num_groups == 1
            else [{"params": [p]} for p in model.parameters()]
        )
        arguments = {"optimizer": torch.optim.Adam(params)}
        return make_engine(model, arguments=arguments, optimizer=None, zero_optimization={"stage": stage})

    create(2, 1).save_checkpoint(tmp_path)
    for stage in (0, 1):
        engine = create(1, stage)
        with pytest.raises(
            CheckpointError, match="found 2 parameter groups, .* or load with load_optimizer_states=False"
        ):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)[0]


def test_weights_of_other_names(make_engine, tmp_path):
    make_engine(torch.nn.Sequential(torch.nn.Linear(2, 2)), optimizer=ADAM).save_checkpoint(tmp_path)
    model = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2, bias=False), "head": torch.nn.Linear(2, 1)})
    engine = make_engine(model, optimizer=ADAM)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"head\.weight is missing there; .*0\.bias is not in the model"):
        engine.load_checkpoint(tmp_path, load_module_only=True)
    assert torch.equal(model["0"].weight, before["0.weight"])
    engine.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)
    assert not torch.equal(model["0"].weight, before["0.weight"])
    assert torch.equal(model["head"].weight, before["head.weight"])


def test_loaded_weights_of_another_model_change_nothing(make_engine):
    engine = make_engine(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4)), optimizer=ADAM)
    before = engine.module[0].weight.detach().clone()
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)).state_dict()
    with pytest.raises(CheckpointError, match=r"load_module_state_dict: .*1\.weight is \(3, 2\) there"):
        engine.load_module_state_dict({"module": other})
    with pytest.raises(CheckpointError, match=r"found the keys '0\.weight', .* and none named \"module\""):
        engine.load_module_state_dict(other)
    assert torch.equal(engine.module[0].weight, before)


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
LION = {"type": "Lion", "params": {"lr": 0.1}}


def stepped(make_engine, optimizer, **keys):
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=optimizer, train_batch_size=1, **keys)
    engine.backward(engine(torch.ones(1, 2, dtype=engine.module.weight.dtype)).sum())
    engine.step()
    return engine


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (0, True), (1, False), (2, True)])
@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        (SGD, ADAM, r"that of SGD \(states: momentum_buffer; .*this run has FusedAdam \(states: exp_avg, "),
        (ADAM, SGD, r"that of Adam \(states: exp_avg, exp_avg_sq; .*this run has SGD \(states: momentum_buffer; "),
        (ADAM, LION, r"that of Adam .*this run has FusedLion "),
        ({"type": "SGD", "params": {"lr": 0.1}}, ADAM, r"that of SGD \(states: none; options: dampening, lr, "),
    ],
    ids=["SGD-Adam", "Adam-SGD", "Adam-Lion", "plain SGD-Adam"],
)
def test_the_state_of_another_optimizer(make_engine, tmp_path, stage, bf16, saved, loading, message):
    keys = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
    stepped(make_engine, saved, **keys).save_checkpoint(tmp_path)
    engine = make_engine(torch.nn.Linear(2, 1), optimizer=loading, **keys)
    before = engine.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path)
    assert torch.equal(engine.module.weight, before)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)


@pytest.mark.parametrize("stage", [0, 2])
def test_optimizers_with_the_same_states_take_each_others(make_engine, tmp_path, stage):
    fused = stepped(make_engine, ADAM, zero_optimization={"stage": stage})
    fused.save_checkpoint(tmp_path)
    types = {type(fused.basic_optimizer)}
    for params in ({"torch_adam": True}, {}):
        optimizer = {"type": "AdamW", "params": {"lr": 0.1, **params}}
        engine = make_engine(torch.nn.Linear(2, 1), optimizer=optimizer, zero_optimization={"stage": stage})
        engine.load_checkpoint(tmp_path)
        engine.backward(engine(torch.ones(4, 2)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path)
        types.add(type(engine.basic_optimizer))
    assert len(types) > 1


def test_other_parameter_groups_of_a_plain_optimizer(make_engine, tmp_path):
    stepped(make_engine, ADAM).save_checkpoint(tmp_path)
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    engine = make_engine(model, optimizer=ADAM, arguments={"model_parameters": groups})
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="found 1 parameter group, this run has 2"):
        engine.load_checkpoint(tmp_path)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_values_is_refused(stage):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError, match=r"^initialize: found 2 .* '1\.weight', on the meta device.*zero\.Init"):
        deepspeed.initialize(model=model, config=config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "'deepspeed' with zero_optimization.stage 0.*use stage 1"),
        ({"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}}, "'deepspeed' with fp16 and .*stage 3"),
        ({"zero_optimization": {"stage": 1}, "checkpoint": {"format": "dcp"}}, "checkpoint.format"),
    ],
)
def test_a_form_of_files_that_cannot_be_written(single_rank, make_engine, config, words):
    config = {"checkpoint": {"format": "deepspeed"}, **config}
    with pytest.raises(ConfigError, match=words):
        make_engine(torch.nn.Linear(2, 1), optimizer=ADAM, **config)
