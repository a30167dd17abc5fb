"""`zero.Init` and `GatheredParameters` where parameters are whole, and what `zero.Init` refuses."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from torch import nn


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_init_refuses_a_stage_that_would_leave_modules_alone(stage):
    with pytest.raises(
        ConfigError, match=rf"zero\.Init: zero_optimization\.stage is {stage}, so no parameter would be"
    ):
        deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": stage}})


def test_init_can_be_turned_off():
    with deepspeed.zero.Init(enabled=False, config={"zero_optimization": {"stage": 3}}) as context:
        assert not context.enabled
        layer = nn.Linear(3, 2)
    assert layer.weight.shape == (2, 3)


def test_init_refuses_an_unknown_device():
    with pytest.raises(ConfigError, match='remote_device is \'disk\'; give "cpu", "nvme", or "none"'):
        deepspeed.zero.Init(remote_device="disk")


@pytest.mark.usefixtures("single_rank")
def test_init_refuses_parameters_without_values():
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    with (
        deepspeed.zero.Init(config_dict_or_path=config),
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"^zero\.Init: .* such as 'weight', on the meta device"),
    ):
        nn.Linear(3, 2)


@pytest.mark.usefixtures("single_rank")
def test_freed_memory_is_returned_while_weights_are_sharded_and_kept_in_training(monkeypatch):
    asked = []
    accelerator = get_accelerator()
    monkeypatch.setattr(accelerator, "return_freed_memory", asked.append)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        layer = nn.Linear(3, 2)
        assert asked == [2**17]
    assert asked.pop() is None
    deepspeed.zero.Init(module=nn.Linear(3, 2), config_dict_or_path=config)
    assert asked.pop() is None
    engine, *_ = deepspeed.initialize(model=layer, config=config)
    assert asked == [2**17] * 3 + [None]
    engine.backward(engine(torch.ones(1, 3)).sum())
    assert len(asked) == 4


def test_gathered_parameters_are_the_parameters():
    layer = nn.Linear(3, 2)
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0) as context:
        assert context.params == [layer.weight]
        with torch.no_grad():
            layer.weight.zero_()
    assert layer.weight.abs().sum() == 0
    assert len(deepspeed.zero.GatheredParameters(layer.parameters()).params) == 2


def test_a_bias_that_is_none_is_passed_over():
    layer = nn.Linear(3, 2, bias=False)
    assert deepspeed.zero.GatheredParameters([layer.weight, layer.bias]).params == [layer.weight]


@pytest.mark.parametrize(
    ("params", "found"),
    [
        (lambda net: net, "Sequential"),
        (lambda net: net.children(), "Linear"),
        (lambda net: net.named_parameters(), "tuple"),
        (lambda net: dict(net.named_parameters()), "str"),
        (lambda net: 3, "int"),
    ],
)
def test_what_is_no_parameter_is_refused(params, found):
    """It would be passed over in silence, and the parameters stay empty."""
    with pytest.raises(TypeError, match=rf"^GatheredParameters: found {found}, wanted a parameter or an iter"):
        deepspeed.zero.GatheredParameters(params(nn.Sequential(nn.Linear(3, 2))))


@pytest.mark.parametrize(
    ("argument", "found", "wanted"),
    [
        ("module", "Linear", "a module that was built"),
        ("dtype", "bf16", "a torch.dtype"),
        ("mpu", "3", r"an object with get_data_parallel_group\(\)"),
    ],
)
def test_init_names_an_argument_of_a_wrong_type(argument, found, wanted, single_rank):
    given = {"Linear": nn.Linear, "3": 3}.get(found, found)
    with pytest.raises(ConfigError, match=rf"zero.Init: {argument} is .*{found}.*; give {wanted}"):
        deepspeed.zero.Init(**{argument: given})


def test_an_exception_inside_passes_through():
    with pytest.raises(RuntimeError, match="inside"), deepspeed.zero.GatheredParameters([]):
        raise RuntimeError("inside")


def test_external_parameters_are_checked():
    layer = nn.Linear(3, 2)
    deepspeed.zero.register_external_parameter(layer, layer.weight)
    deepspeed.zero.unregister_external_parameter(layer, layer.weight)
    with pytest.raises(TypeError, match=r"register_external_parameter: found Tensor, wanted a torch\.nn\.Parameter"):
        deepspeed.zero.register_external_parameter(layer, torch.ones(2))


def test_an_unknown_name_of_the_room():
    with pytest.raises(AttributeError, match="'deepspeed.zero' has no attribute 'nothing'"):
        deepspeed.zero.nothing
