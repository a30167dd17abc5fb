"""`initialize`: its four results, its arguments, and the one-line refusals of wrong ones."""

import argparse
import json

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.zero.optimizer import ZeroOptimizer
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

SGD = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
ADAM = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}

pytestmark = pytest.mark.usefixtures("single_rank")


def test_the_four_results():
    model = nn.Linear(4, 2)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=TensorDataset(torch.ones(8, 4)),
        config={**SGD, "scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 1}},
    )
    assert engine.module is model
    assert (optimizer, loader, scheduler) == (engine.optimizer, engine.training_dataloader, engine.lr_scheduler)
    assert isinstance(optimizer, ZeroOptimizer)
    assert len(loader) == 2
    engine.destroy()


def test_what_there_is_none_of_is_none():
    engine, *rest = deepspeed.initialize(model=nn.Linear(4, 2), config={"train_batch_size": 4})
    assert rest == [None, None, None]
    assert engine(torch.ones(1, 4)).shape == (1, 2)
    assert engine.get_lr() == []


def test_a_step_without_an_optimizer():
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config={"train_batch_size": 4})
    engine.backward(engine(torch.ones(1, 4)).sum())
    with pytest.raises(deepspeed.errors.StateError, match='the engine has no optimizer; give one .*"optimizer"'):
        engine.step()


@pytest.mark.parametrize("model", [None, lambda x: x, nn.Linear])
def test_no_model(model):
    with pytest.raises(ConfigError, match=r"initialize: model is \w+; pass a torch\.nn\.Module"):
        deepspeed.initialize(model=model, config=SGD)


def test_a_model_in_the_place_of_args():
    with pytest.raises(ConfigError, match=r"model is dict; pass a torch\.nn\.Module, by name: .*model=model"):
        deepspeed.initialize(nn.Linear(4, 2), SGD)


def test_no_configuration():
    with pytest.raises(ConfigError, match=r"initialize: found no configuration; pass config="):
        deepspeed.initialize(model=nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="--deepspeed_config through args"):
        deepspeed.initialize(args=argparse.Namespace(deepspeed_config=None), model=nn.Linear(4, 2))


def test_two_configurations_that_differ():
    with pytest.raises(ConfigError, match="different configurations in config and config_params; give one"):
        deepspeed.initialize(model=nn.Linear(4, 2), config=SGD, config_params={**SGD, "train_batch_size": 8})


@pytest.mark.parametrize("place", ["config", "config_params", "args", "both"])
def test_a_configuration_in_any_place(tmp_path, place):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**SGD, "train_batch_size": 6}))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    given = {
        "config": {"config": str(path)},
        "config_params": {"config_params": {**SGD, "train_batch_size": 6}},
        "args": {"args": args},
        "both": {"args": args, "config": str(path)},
    }[place]
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), **given)
    assert engine.train_batch_size() == 6
    assert engine.config == {**SGD, "train_batch_size": 6}


def test_the_users_dict_is_not_changed():
    config = json.loads(json.dumps(SGD))
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=config)
    assert config == SGD
    assert engine.config is config


@pytest.mark.parametrize("given", [3, lambda params: "adam"])
def test_an_optimizer_of_a_wrong_type(given):
    with pytest.raises(ConfigError, match=r"optimizer .*(int|str); wanted a torch\.optim\.Optimizer"):
        deepspeed.initialize(model=nn.Linear(4, 2), config=SGD, optimizer=given)


class StepsOnAClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: hands each call on to `.optimizer`."""

    def __init__(self, params):
        self.optimizer = StepsOnAClosure(params)
        super().__init__(self.optimizer.param_groups, {})

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, StepsOnAClosure, Wrapper])
@pytest.mark.parametrize("given", ["object", "class"])
def test_an_optimizer_whose_step_needs_a_closure(stage, kind, given):
    model = nn.Linear(4, 2)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    message = (
        rf"^optimizer: found {kind.__name__}, whose step\(\) needs closure, and engine\.step\(\) gives none.*AdamW"
    )
    with pytest.raises(ConfigError, match=message):
        deepspeed.initialize(
            model=model, config=config, optimizer=kind(model.parameters()) if given == "object" else kind
        )
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    engine.destroy()


def test_an_optimizer_that_zero_was_not_tested_with():
    model = nn.Linear(4, 2)
    sharded = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    with pytest.raises(
        ConfigError, match='found Rprop with zero_optimization.stage 1.*"zero_allow_untested_optimizer"'
    ):
        deepspeed.initialize(model=model, config=sharded, optimizer=torch.optim.Rprop(model.parameters()))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={**sharded, "zero_allow_untested_optimizer": True},
        optimizer=torch.optim.Rprop(model.parameters()),
    )
    assert type(engine.basic_optimizer) is torch.optim.Rprop
    engine.destroy()
    deepspeed.initialize(model=model, config={"train_batch_size": 4}, optimizer=torch.optim.Rprop(model.parameters()))


def test_an_optimizer_given_beats_the_configs():
    model = nn.Linear(4, 2)
    engine, *_ = deepspeed.initialize(model=model, config=SGD, optimizer=lambda p: torch.optim.Adam(p, lr=0.7))
    assert type(engine.basic_optimizer) is torch.optim.Adam
    assert engine.get_lr() == [0.7]


def test_auto_that_nobody_filled_in():
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    with pytest.raises(ConfigError, match=r'^optimizer\.params\.lr: found "auto"'):
        deepspeed.initialize(model=nn.Linear(4, 2), config=config)


def test_a_parameter_in_two_groups():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(model.weight)
    with pytest.raises(ConfigError, match=r"param_groups\[1\]: a parameter of shape \(2, 4\) is in two groups"):
        deepspeed.initialize(model=model, config={"train_batch_size": 4}, optimizer=optimizer)


def test_offload_moves_nothing_where_memory_is_the_hosts():
    config = {**SGD, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=config)
    assert not engine.sharding.placement.is_offloaded


def test_an_offloaded_optimizer_that_is_given_must_be_one_for_the_host():
    def start(optimizer, **keys):
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
        return deepspeed.initialize(model=nn.Linear(4, 2), config={**config, **keys}, optimizer=optimizer)[0]

    with pytest.raises(ConfigError, match=r"^zero_force_ds_cpu_optimizer: found true.* the class AdamW, which is slow"):
        start(torch.optim.AdamW)
    assert isinstance(start(torch.optim.AdamW, zero_force_ds_cpu_optimizer=False).basic_optimizer, torch.optim.AdamW)
    assert isinstance(start(DeepSpeedCPUAdam).basic_optimizer, DeepSpeedCPUAdam)


def test_an_offloaded_optimizer_that_the_config_names_is_the_one_for_the_host():
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=config)
    assert type(engine.basic_optimizer) is DeepSpeedCPUAdam


@pytest.mark.parametrize("kind", ["instance", "callable", "class"])
def test_a_scheduler_given(kind):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    given = {
        "instance": lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        "callable": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        "class": lr_scheduler.LinearLR,
    }[kind]
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_batch_size": 1}, optimizer=optimizer, lr_scheduler=given
    )
    before = engine.get_lr()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert isinstance(engine.lr_scheduler, lr_scheduler.LRScheduler)
    assert engine.get_lr() != before


def test_frozen_and_empty_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    engine, *_ = deepspeed.initialize(model=model, config={**SGD, "zero_optimization": {"stage": 2}})
    assert engine.sharding.units.params == [model[1].weight, model[1].bias]


@pytest.mark.parametrize(
    "hand_over", [lambda model: None, lambda model: (p for p in model.parameters() if p.requires_grad)]
)
def test_a_frozen_reference_model_only_evaluates(hand_over):
    """As trainers hand it over: with the configuration of the model that is trained."""
    model = nn.Linear(4, 2).requires_grad_(False)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=hand_over(model), config=SGD)
    assert optimizer is None
    assert engine(torch.ones(1, 4)).shape == (1, 2)


def test_the_arguments_of_a_script():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")


@pytest.mark.parametrize("given", ["cosine", 3, {"type": "WarmupLR"}, lambda optimizer: None])
def test_what_is_no_schedule(given):
    with pytest.raises(ConfigError, match=r"initialize: lr_scheduler (is|gave) \w+; wanted .* step\(\)"):
        deepspeed.initialize(model=nn.Linear(4, 2), lr_scheduler=given, config=SGD)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lr_scheduler.StepLR, r"lr_scheduler is StepLR, .*'step_size'.*lambda optimizer: StepLR\(optimizer, \.\.\.\)"),
        (lambda: None, "lr_scheduler is <lambda>, .*too many positional arguments"),
    ],
)
def test_what_makes_no_schedule_of_the_optimizer_alone(given, message):
    with pytest.raises(ConfigError, match=message):
        deepspeed.initialize(model=nn.Linear(4, 2), lr_scheduler=given, config=SGD)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.linear = nn.Linear(4, 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_complex_parameters_are_trained_in_fp32_alone(precision):
    with pytest.raises(ConfigError, match=rf"{precision}: .*'filter' is complex64.*view_as_real"):
        deepspeed.initialize(model=Spectral(), config={**SGD, precision: {"enabled": True}})
    frozen = Spectral()
    frozen.filter.requires_grad_(False)
    for model, config in ((frozen, {**SGD, precision: {"enabled": True}}), (Spectral(), SGD)):
        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert engine.module.filter.is_complex()
        engine.destroy()


@pytest.mark.parametrize("given", [3, "data.json", iter([1, 2])])
def test_what_is_no_dataset(given):
    with pytest.raises(ConfigError, match=r"training_data is \w+; give a dataset with __len__ and __getitem__, or an"):
        deepspeed.initialize(model=nn.Linear(4, 2), training_data=given, config=SGD)
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=SGD)
    with pytest.raises(ConfigError, match=r"deepspeed_io: dataset is \w+"):
        engine.deepspeed_io(given)


@pytest.mark.parametrize("given", [[], (), torch.utils.data.TensorDataset(torch.zeros(0, 4))])
def test_a_dataset_without_a_sample(given):
    with pytest.raises(ConfigError, match=r"training_data is \w+ without a sample; give what to train on, or leave it"):
        deepspeed.initialize(model=nn.Linear(4, 2), training_data=given, config=SGD)
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=SGD)
    assert list(engine.deepspeed_io(given, route="eval")) == []
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_an_engine_that_inference_mode_builds_or_loads_trains_after_it(tmp_path, stage):
    def build():
        return deepspeed.initialize(model=nn.Linear(4, 2), config={**ADAM, "zero_optimization": {"stage": stage}})[0]

    def step(engine):
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
        return engine.module.weight.detach().clone()

    trained = build()
    step(trained)
    trained.save_checkpoint(tmp_path)
    model = nn.Linear(4, 2)
    with torch.inference_mode():
        engine, *_ = deepspeed.initialize(model=model, config={**ADAM, "zero_optimization": {"stage": stage}})
        engine.load_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match=r"'weight' was made within torch.inference_mode\(\), where no parameter"):
            build()
    assert torch.equal(step(engine), step(trained))


def test_a_loader_in_the_place_of_a_dataset():
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(ConfigError, match="training_data is DataLoader; give its dataset, or go through the loader in"):
        deepspeed.initialize(model=nn.Linear(4, 2), training_data=loader, config=SGD)


def test_what_collates_nothing():
    with pytest.raises(ConfigError, match="collate_fn is str; give a function that makes a batch"):
        deepspeed.initialize(model=nn.Linear(4, 2), training_data=[1, 2], collate_fn="pad", config=SGD)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_lazy_layer_before_its_first_forward(stage):
    model = nn.Sequential(nn.Linear(4, 2), nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"'1.weight', without a shape.* call the model once"):
        deepspeed.initialize(model=model, config={**SGD, "zero_optimization": {"stage": stage}})


def test_a_missing_file_names_itself():
    with pytest.raises(ConfigError, match="no_such_file.json"):
        deepspeed.initialize(model=nn.Linear(4, 2), config="no_such_file.json")
