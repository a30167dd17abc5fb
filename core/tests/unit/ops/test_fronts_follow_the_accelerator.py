"""After `set_accelerator(X)` config "Adam", `FusedAdam` and the other fronts step by X's kernels, whoever was first."""

import types

import pytest
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import create_optimizer


@pytest.fixture
def make(builders):
    """Makes an accelerator whose op writes down by which operator it was stepped; with that list."""

    def make(op):
        calls = []
        names = ("adam_step_", "lion_step_", "adagrad_step_", "lamb_step_")
        loaded = types.SimpleNamespace(
            **{name: lambda *args, name=name, **kwargs: calls.append(name) for name in names}
        )
        return builders.accelerator(builders.make(op, loaded), name="cpu")(), calls

    return make


def one_step(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


FRONTS = {
    "fused_adam": (FusedAdam, "adam_step_"),
    "cpu_adam": (DeepSpeedCPUAdam, "adam_step_"),
    "fused_lion": (FusedLion, "lion_step_"),
    "cpu_lion": (DeepSpeedCPULion, "lion_step_"),
    "cpu_adagrad": (DeepSpeedCPUAdagrad, "adagrad_step_"),
    "fused_lamb": (FusedLamb, "lamb_step_"),
}


@pytest.mark.parametrize("op", FRONTS)
def test_a_front_steps_by_the_accelerator_in_force(make, op):
    front, operator = FRONTS[op]
    (a, calls_of_a), (b, calls_of_b) = make(op), make(op)
    set_accelerator(a)
    optimizer = front([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    one_step(optimizer)
    assert (calls_of_a, calls_of_b) == ([operator], [])
    set_accelerator(b)
    one_step(optimizer)
    one_step(front([torch.nn.Parameter(torch.ones(3))], lr=0.1))
    assert (calls_of_a, calls_of_b) == ([operator], [operator, operator])


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_configs_adam_is_the_accelerators(make, name):
    (a, calls_of_a), (b, calls_of_b) = make("fused_adam"), make("fused_adam")
    for accelerator in (a, b):
        set_accelerator(accelerator)
        one_step(create_optimizer(name, {"lr": 0.1}, [torch.nn.Parameter(torch.ones(3))]))
    assert (calls_of_a, calls_of_b) == (["adam_step_"], ["adam_step_"])


def test_without_a_kernel_the_reference_steps(builders):
    param = torch.nn.Parameter(torch.ones(3))
    one_step(FusedAdam([param], lr=0.1))
    assert torch.allclose(param, torch.full((3,), 0.9), atol=1e-6)


@pytest.mark.parametrize("switch", ["fused_adam", "all"])
def test_disabled_ops_step_by_the_reference(make, monkeypatch, switch):
    accelerator, calls = make("fused_adam")
    set_accelerator(accelerator)
    monkeypatch.setenv("DS_OPS_DISABLE", switch)
    param = torch.nn.Parameter(torch.ones(3))
    one_step(FusedAdam([param], lr=0.1))
    assert calls == []
    assert torch.allclose(param, torch.full((3,), 0.9), atol=1e-6)
