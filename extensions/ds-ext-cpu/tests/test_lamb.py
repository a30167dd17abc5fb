"""The operator `lamb_step_` and the front that calls it, against the formula in fp64 and the torch reference."""

import copy

import pytest
import torch
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.optimizer import OnePass
from torch.nn import Parameter

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MODES = {"bias_correction": True, "eps_inside_sqrt": False, "min_coeff": 0.01, "max_coeff": 10.0}


@pytest.fixture
def lamb(step_ops):
    return step_ops.operator("fused_lamb", "lamb_step_")


def _reference(param, grads, *, lr, beta1, beta2, eps, weight_decay, bias_correction, eps_inside_sqrt, **bounds):
    """(p, m, v, last ratio) in fp64 after steps with these gradients."""
    m, v, ratio = torch.zeros_like(param), torch.zeros_like(param), torch.ones(())
    for t, grad in enumerate(grads, start=1):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1, 1)
        denominator = (v / c2 + eps).sqrt() if eps_inside_sqrt else (v / c2).sqrt() + eps
        u = m / c1 / denominator + weight_decay * param
        usable = param.norm() > 0 and u.norm() > 0
        ratio = (param.norm() / u.norm()).clamp(bounds["min_coeff"], bounds["max_coeff"]) if usable else torch.ones(())
        param = param - lr * ratio * u
    return param, m, v, ratio


def _run(lamb, step_ops, param, grads, copies=(), grad_scale=1.0, **modes):
    numel = param.numel()
    m, v, step, coeffs = step_ops.zeros(numel), step_ops.zeros(numel), torch.tensor(0.0), torch.zeros(1)
    for grad in grads:
        numbers = {**NUMBERS, **MODES, **modes, "grad_scale": grad_scale}
        lamb([param], [grad], [m], [v], [step], list(copies), coeffs, **numbers)
    assert step.item() == len(grads)
    return m, v, coeffs[0]


def test_equals_the_formula(lamb, step_ops, numel, dtypes):
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, param_dtype)
    copies = [] if copy_dtype is None else [step_ops.zeros(numel, copy_dtype)]
    grads = [step_ops.numbers(numel, grad_dtype, seed=seed) for seed in (1, 2, 3)]
    if param_dtype != torch.float32:  # rounded after each step, which the formula is not
        grads = grads[:1]
    wanted = _reference(param.double(), [grad.double() * 0.37 for grad in grads], **NUMBERS, **MODES)
    m, v, ratio = _run(lamb, step_ops, param, grads, copies, grad_scale=0.37)
    for found, reference in zip((param, m, v, ratio), wanted, strict=True):
        step_ops.assert_close(found, reference.float())
    for rounded in copies:
        step_ops.assert_copied(param, rounded)


@pytest.mark.parametrize("modes", [{"bias_correction": False}, {"eps_inside_sqrt": True}])
@pytest.mark.parametrize("bounds", [{"min_coeff": 2.0}, {"max_coeff": 0.1}])
def test_modes_and_bounds_equal_the_formula(lamb, step_ops, modes, bounds):
    param, grads = step_ops.numbers(1000), [step_ops.numbers(1000, seed=seed) for seed in (1, 2)]
    wanted = _reference(param.double(), [grad.double() for grad in grads], **{**NUMBERS, **MODES, **modes, **bounds})
    m, v, ratio = _run(lamb, step_ops, param, grads, **modes, **bounds)
    for found, reference in zip((param, m, v, ratio), wanted, strict=True):
        step_ops.assert_close(found, reference.float())


def test_the_ratio_is_1_without_a_norm_and_each_tensor_has_its_own(lamb):
    params = [torch.zeros(5), torch.ones(5), torch.full((5,), 4.0)]
    lists = [[torch.zeros(5) for _ in params] for _ in range(2)]
    steps, coeffs = [torch.tensor(0.0) for _ in params], torch.zeros(3)
    grads = [torch.ones(5), torch.zeros(5), torch.ones(5)]
    numbers = {**NUMBERS, **MODES, "weight_decay": 0.0, "eps": 0.0, "grad_scale": 1.0}
    lamb(params, grads, *lists, steps, [], coeffs, **numbers)
    assert coeffs[:1].tolist() == [1.0]
    torch.testing.assert_close(coeffs[2], torch.tensor(4.0))
    torch.testing.assert_close(params[2], torch.full((5,), 4.0 - 4.0 * NUMBERS["lr"]))


def test_a_result_does_not_depend_on_threads(lamb, step_ops):
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            param = step_ops.numbers(65537)
            _run(lamb, step_ops, param, [step_ops.numbers(65537, seed=1)])
            results.append(param)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_refuses_wrong_arguments_by_name(lamb, step_ops):
    lists = {name: [torch.ones(5)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]

    def call(coeffs=None, **given):
        coeffs = torch.zeros(len(given["params"])) if coeffs is None else coeffs
        lamb(**given, coeffs=coeffs, **NUMBERS, **MODES, grad_scale=1.0)

    step_ops.check_refusals(call, lists)
    for wrong, found in (
        (torch.zeros(2), r"shape \(2\)"),
        (torch.zeros(1, dtype=torch.float64), "dtype float64"),
        (torch.zeros(1, device="meta"), "a tensor on meta"),
    ):
        with pytest.raises(RuntimeError, match=rf"coeffs(\[0\])?: found {found}"):
            call(coeffs=wrong, **lists)


@pytest.mark.parametrize("with_copies", [True, False])
def test_opcheck(lamb, step_ops, with_copies):
    lists = [[step_ops.numbers(20)], [step_ops.numbers(20, torch.bfloat16)], [step_ops.zeros(20)], [step_ops.zeros(20)]]
    copies = [step_ops.zeros(20, torch.bfloat16)] if with_copies else []
    arguments = (*lists, [torch.tensor(0.0)], copies, torch.zeros(1))
    torch.library.opcheck(lamb.default, arguments, {**NUMBERS, **MODES, "grad_scale": 1.0})


# ----- the front -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"bias_correction": False, "weight_decay": 0.2}])
def test_front_equals_its_reference(step_ops, monkeypatch, options):
    results = []
    for disabled in ("", "all"):
        monkeypatch.setenv("DS_OPS_DISABLE", disabled)
        params = [Parameter(step_ops.numbers(70).view(7, 10)), Parameter(step_ops.numbers(5, seed=4))]
        optimizer = FusedLamb([{"params": params[1:]}, {"params": params[:1]}], lr=1e-2, **options)
        assert optimizer.takes_one_pass is (disabled == "" and "max_grad_norm" not in options)
        for seed in range(3):
            for param in params:
                param.grad = step_ops.numbers(param.numel(), seed=seed).view(param.shape)
            optimizer.step()
        results.append((params, optimizer.get_lamb_coeffs(), copy.deepcopy(optimizer.state_dict())))
    (params, ratios, state), (wanted, wanted_ratios, wanted_state) = results
    for a, b in zip(params, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(ratios, wanted_ratios, rtol=2e-6, atol=1e-6)
    for index, found in state["state"].items():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(found[name], wanted_state["state"][index][name], rtol=2e-6, atol=1e-6)


def test_one_pass_equals_cast_scale_step_and_copy(step_ops):
    master, reference = (Parameter(step_ops.numbers(100)) for _ in range(2))
    weight, grad = torch.zeros(100, dtype=torch.bfloat16), step_ops.numbers(100, torch.bfloat16, seed=1)
    ours, theirs = FusedLamb([master], lr=1e-2), FusedLamb([reference], lr=1e-2)
    ours.step(one_pass=OnePass([[grad]], [[weight]], 0.25))
    reference.grad = grad.float() * 0.25
    theirs.step()
    assert torch.equal(master, reference)
    assert torch.equal(weight, reference.bfloat16())
    assert ours.get_lamb_coeffs() == theirs.get_lamb_coeffs()
