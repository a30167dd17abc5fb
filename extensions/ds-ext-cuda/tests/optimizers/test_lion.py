"""The operator `lion_step_` and the front that calls it, against the formula."""

import pytest
import torch
from deepspeed.ops.lion import FusedLion
from ds_ext_cuda.op_builder import FusedLionBuilder
from torch.nn import Parameter

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1}


@pytest.fixture
def lion(load_op):
    return load_op(FusedLionBuilder).lion_step_


def _reference(param, grads, *, lr, beta1, beta2, weight_decay):
    """(p, m) after steps with these gradients. In fp32: a sum that is 0 in one precision has a sign in another."""
    m = torch.zeros_like(param)
    for grad in grads:
        param = param * (1 - lr * weight_decay) - lr * torch.lerp(m, grad, 1 - beta1).sign()
        m = torch.lerp(m, grad, 1 - beta2)
    return param, m


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_equals_the_formula(lion, step_ops, numel, dtypes, offset):
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, dtype=param_dtype, offset=offset)
    copies = [] if copy_dtype is None else [step_ops.zeros(numel, copy_dtype, offset=offset)]
    grads = [step_ops.numbers(numel, dtype=grad_dtype, seed=seed, offset=offset) for seed in (1, 2)]
    if param_dtype != torch.float32:  # rounded after each step, which the formula is not
        grads = grads[:1]
    wanted = _reference(param.float(), [grad.float() * 0.37 for grad in grads], **NUMBERS)
    m, step = step_ops.zeros(numel, offset=offset), torch.tensor(0.0)
    for grad in grads:
        lion([param], [grad], [m], [step], copies, **NUMBERS, grad_scale=0.37)
    assert step.item() == len(grads)
    for found, reference in zip((param, m), wanted, strict=True):
        step_ops.assert_close(found, reference)
    for rounded in copies:
        step_ops.assert_copied(param, rounded)


def test_a_zero_gradient_moves_nothing_but_decay(lion, step_ops):
    param, m = step_ops.numbers(10), step_ops.zeros(10)
    wanted = param * (1 - 3e-2 * 0.1)
    lion([param], [step_ops.zeros(10)], [m], [torch.tensor(0.0)], [], **NUMBERS, grad_scale=1.0)
    step_ops.assert_close(param, wanted)
    assert not m.any()


def test_many_tensors_in_one_call(lion, step_ops):
    sizes = [(3 * index) % 17 for index in range(step_ops.many)]
    params = [step_ops.numbers(size, seed=index) for index, size in enumerate(sizes)]
    grads = [step_ops.numbers(size, seed=index + 1) for index, size in enumerate(sizes)]
    wanted = [_reference(p, [g], **NUMBERS)[0] for p, g in zip(params, grads, strict=True)]
    steps = [torch.tensor(0.0) for _ in sizes]
    lion(params, grads, [step_ops.zeros(size) for size in sizes], steps, [], **NUMBERS, grad_scale=1.0)
    for found, reference in zip(params, wanted, strict=True):
        step_ops.assert_close(found, reference)


def test_refuses_wrong_arguments_by_name(lion, step_ops, device):
    lists = {name: [torch.ones(5, device=device)] for name in ("params", "grads", "exp_avgs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    step_ops.check_refusals(lambda **given: lion(**given, **NUMBERS, grad_scale=1.0), lists)


def test_a_step_under_capture_is_refused(lion, step_ops, device):
    lists = {name: [torch.ones(5, device=device)] for name in ("params", "grads", "exp_avgs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    step_ops.check_capture(lambda **given: lion(**given, **NUMBERS, grad_scale=1.0), lists)


def test_opcheck(lion, step_ops):
    lists = [[step_ops.numbers(20)], [step_ops.numbers(20)], [step_ops.zeros(20)], [torch.tensor(0.0)]]
    torch.library.opcheck(lion.default, (*lists, []), {**NUMBERS, "grad_scale": 1.0})


@pytest.mark.usefixtures("in_force")
def test_front_equals_its_reference(step_ops, monkeypatch):
    results = []
    for disabled in ("", "all"):
        monkeypatch.setenv("DS_OPS_DISABLE", disabled)
        param = Parameter(step_ops.numbers(70))
        optimizer = FusedLion([param], lr=1e-2, weight_decay=0.1)
        assert optimizer.takes_one_pass is (disabled == "")
        for seed in range(3):
            param.grad = step_ops.numbers(70, seed=seed)
            optimizer.step()
        results.append(param.detach())
    step_ops.assert_close(*results)
