"""The operator `lion_step_` and the Lion fronts that call it, against the torch reference."""

import copy

import pytest
import torch
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.optimizer import OnePass
from torch.nn import Parameter

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1}


@pytest.fixture
def lion(step_ops):
    return step_ops.operator("cpu_lion", "lion_step_")


def _reference(param, momentum, grad, lr, beta1, beta2, weight_decay):
    """(p, m) in fp32, by torch operations."""
    direction = torch.lerp(momentum, grad, 1 - beta1).sign()
    return param * (1 - lr * weight_decay) - direction * lr, torch.lerp(momentum, grad, 1 - beta2)


def test_equals_the_reference(lion, step_ops, numel, dtypes):
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, param_dtype)
    wanted, wanted_momentum = param.clone(), torch.zeros(numel)
    momentum, step = step_ops.zeros(numel), torch.tensor(0.0)
    copies = [] if copy_dtype is None else [step_ops.zeros(numel, copy_dtype)]
    for seed in range(1, 4):
        grad = step_ops.numbers(numel, grad_dtype, seed=seed)
        lion([param], [grad], [momentum], [step], copies, **NUMBERS, grad_scale=0.37)
        updated, wanted_momentum = _reference(wanted.float(), wanted_momentum, grad.float() * 0.37, **NUMBERS)
        wanted.copy_(updated)
    step_ops.assert_close(param, wanted)
    step_ops.assert_close(momentum, wanted_momentum)
    assert step.item() == 3
    for rounded in copies:
        step_ops.assert_copied(param, rounded)


@pytest.mark.parametrize("beta", [0.25, 0.5])
def test_large_weights_interpolate_from_the_other_end(lion, step_ops, beta):
    param, grad, momentum = step_ops.numbers(100), step_ops.numbers(100, seed=1), step_ops.numbers(100, seed=2)
    numbers = {**NUMBERS, "beta1": beta, "beta2": beta}
    wanted, wanted_momentum = _reference(param, momentum, grad, **numbers)
    lion([param], [grad], [momentum], [torch.tensor(0.0)], [], **numbers, grad_scale=1.0)
    step_ops.assert_close(param, wanted)
    step_ops.assert_close(momentum, wanted_momentum)


def test_a_direction_of_zero_or_nan_moves_nothing(lion):
    """As torch.sign has it; NaN stays in the momentum."""
    param, momentum = torch.ones(20), torch.zeros(20)
    grad = torch.zeros(20)
    grad[3], grad[19], grad[5] = float("nan"), float("nan"), float("inf")
    lion([param], [grad], [momentum], [torch.tensor(0.0)], [], **{**NUMBERS, "weight_decay": 0.0}, grad_scale=1.0)
    wanted = torch.ones(20)
    wanted[5] -= NUMBERS["lr"]
    assert torch.equal(param, wanted)
    assert momentum.isnan().nonzero().flatten().tolist() == [3, 19]


def test_refuses_wrong_arguments_by_name(lion, step_ops):
    lists = {name: [torch.ones(5)] for name in ("params", "grads", "exp_avgs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    step_ops.check_refusals(lambda **given: lion(**given, **NUMBERS, grad_scale=1.0), lists)


@pytest.mark.parametrize("with_copies", [True, False])
def test_opcheck(lion, step_ops, with_copies):
    lists = [[step_ops.numbers(20)], [step_ops.numbers(20, torch.bfloat16)], [step_ops.zeros(20)], [torch.tensor(0.0)]]
    copies = [step_ops.zeros(20, torch.bfloat16)] if with_copies else []
    torch.library.opcheck(lion.default, (*lists, copies), {**NUMBERS, "grad_scale": 1.0})


# ----- the fronts ----------------------------------------------------------------------------------------------------


def _train(optimizer, params):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("front", [FusedLion, DeepSpeedCPULion])
def test_fronts_equal_their_reference(front, step_ops, monkeypatch):
    results = []
    for disabled in ("", "all"):
        monkeypatch.setenv("DS_OPS_DISABLE", disabled)
        params = [Parameter(step_ops.numbers(70).view(7, 10)), Parameter(step_ops.numbers(5, seed=4))]
        optimizer = front(params, lr=1e-2, weight_decay=0.1)
        assert optimizer.takes_one_pass is (disabled == "")
        _train(optimizer, params)
        results.append((params, copy.deepcopy(optimizer.state_dict())))
    (params, state), (wanted, wanted_state) = results
    for a, b in zip(params, wanted, strict=True):
        step_ops.assert_close(a.detach(), b.detach())
    for index, found in state["state"].items():
        assert found["step"].item() == 3
        step_ops.assert_close(found["exp_avg"], wanted_state["state"][index]["exp_avg"])


def test_one_pass_equals_cast_scale_step_and_copy(step_ops):
    master, reference = (Parameter(step_ops.numbers(100)) for _ in range(2))
    weight, grad = torch.zeros(100, dtype=torch.bfloat16), step_ops.numbers(100, torch.bfloat16, seed=1)
    DeepSpeedCPULion([master], lr=1e-2).step(one_pass=OnePass([[grad]], [[weight]], 0.25))
    reference.grad = grad.float() * 0.25
    DeepSpeedCPULion([reference], lr=1e-2).step()
    assert torch.equal(master, reference)
    assert torch.equal(weight, reference.bfloat16())
