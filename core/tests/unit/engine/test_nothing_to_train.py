"""What the config names and finds nothing to work on: an optimizer without parameters, a schedule without optimizer."""

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError, StateError
from deepspeed.log import warn_once
from torch import nn
from torch.utils.data import TensorDataset

SGD = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

pytestmark = pytest.mark.usefixtures("single_rank")


def exhausted(model):
    params = model.parameters()
    list(params)
    return params


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("model", "params", "message"),
    [
        (nn.Linear(4, 2), exhausted, r"there are no parameters for it \(the model has 2 that train\).*generator"),
        (nn.Linear(4, 2), lambda model: [], r"no parameters for it \(the model has 2"),
        (nn.Linear(4, 2), lambda model: [{"params": []}], r"no parameters for it \(the model has 2"),
        (
            nn.Identity(),
            lambda model: model.parameters(),
            r"no parameters .*has 0 that train\); leave the optimizer out",
        ),
        (nn.Identity(), lambda model: None, r"no parameters .*has 0 that train"),
        (nn.Linear(4, 2).requires_grad_(False), lambda model: model.parameters(), "only frozen .*has 0 that train"),
        (nn.Linear(4, 2).requires_grad_(False), lambda model: [{"params": model.weight}], "only frozen "),
    ],
    ids=["exhausted", "empty", "empty group", "no parameters", "none by default", "frozen", "frozen group"],
)
def test_an_optimizer_with_nothing_to_train(model, params, message, stage):
    config = {**SGD, "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError, match=f"optimizer: the config names SGD, and .*{message}"):
        deepspeed.initialize(model=model, model_parameters=params(model), config=config)


@pytest.mark.parametrize("stage", range(4))
def test_a_frozen_model_with_an_optimizer_of_the_script(stage, tmp_path, lines):
    """It steps as torch's does, which finds no gradient, and trains what is unfrozen and added."""
    warn_once.cache_clear()
    model = nn.Linear(4, 2).requires_grad_(False)
    start = model.weight.clone()
    config = {"train_batch_size": 4, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.step()
    assert engine.global_steps == 1
    assert any("step" in text and "no backward" in text for level, text in lines if level == "WARNING")
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(model.weight, start)
    model.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.weight]})
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    assert torch.allclose(model.weight, start - 0.4)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_callable_that_finds_nothing_to_train(stage):
    def make(params):
        return torch.optim.SGD(params, lr=0.1)

    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    frozen = nn.Linear(4, 2).requires_grad_(False)
    engine, optimizer, *_ = deepspeed.initialize(model=frozen, optimizer=make, config=config)
    assert optimizer is None
    engine.destroy()
    with pytest.raises(ConfigError, match=r"given a callable that makes one, and there are no parameters .* has 2"):
        deepspeed.initialize(model=nn.Linear(4, 2), model_parameters=[], optimizer=make, config=config)


def test_groups_may_be_generators():
    model = nn.Linear(4, 2)
    groups = [{"params": (param for param in model.parameters())}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=SGD)
    assert len(engine.basic_optimizer.param_groups[0]["params"]) == 2
    engine.destroy()


@pytest.mark.parametrize("given", [None, lambda optimizer: None])
def test_a_schedule_without_an_optimizer_is_told(lines, given):
    warn_once.cache_clear()
    config = {"train_batch_size": 4, **({} if given else {"scheduler": {"type": "WarmupLR"}})}
    engine, _, _, scheduler = deepspeed.initialize(model=nn.Linear(4, 2), lr_scheduler=given, config=config)
    assert scheduler is None
    assert [text for level, text in lines if level == "WARNING" and "schedule and no optimizer for it" in text]
    engine.destroy()


def test_a_schedule_that_is_none_is_refused_without_an_optimizer_too():
    config = {"train_batch_size": 4, "scheduler": {"type": "Warmup"}}
    with pytest.raises(ConfigError, match="found 'Warmup', which is not known. Did you mean .WarmupLR"):
        deepspeed.initialize(model=nn.Linear(4, 2), config=config)


def given_data(model):
    return {"training_data": TensorDataset(torch.zeros(4, 4))}


def given_parameters(model):
    return {"model_parameters": list(model.parameters())}


def in_groups(model):
    return {"model_parameters": [{"params": [model.weight]}]}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [(given_data, "training_data"), (given_parameters, "model_parameters"), (in_groups, "model_parameters")],
)
def test_what_is_to_be_trained_without_an_optimizer_is_told_at_the_start(lines, arguments, name, stage):
    warn_once.cache_clear()
    model = nn.Linear(4, 2)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments(model))
    (said,) = [text for level, text in lines if level == "WARNING"]
    assert said.startswith(f"initialize: found {name} and no optimizer; the engine only evaluates, and step() raises. ")
    with pytest.raises(StateError, match="step: the engine has no optimizer; give one to initialize"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("is_trainable", [True, False])
def test_an_engine_that_only_evaluates_is_quiet(lines, is_trainable, stage):
    model = nn.Linear(4, 2).requires_grad_(is_trainable)
    arguments = {} if is_trainable else given_parameters(model)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    assert not [text for level, text in lines if level == "WARNING"]
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_engine_that_only_evaluates_loads_what_another_trained(tmp_path, precision, stage):
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    trained, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config={**SGD, **config})
    trained.save_checkpoint(tmp_path)
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=config)
    assert not torch.equal(engine.module.weight, trained.module.weight)
    for module_only in (False, True):
        with torch.no_grad():
            engine.module.weight.zero_()
        engine.load_checkpoint(tmp_path, load_module_only=module_only)
        assert torch.equal(engine.module.weight, trained.module.weight)
        assert engine.module.weight.dtype == trained.module.weight.dtype
    engine.destroy()
    trained.destroy()
