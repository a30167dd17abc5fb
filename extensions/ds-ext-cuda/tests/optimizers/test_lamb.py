"""The operator `lamb_step_` and the front that calls it, against the formula in fp64."""

import pytest
import torch
from deepspeed.ops.lamb import FusedLamb
from ds_ext_cuda.op_builder import FusedLambBuilder
from torch.nn import Parameter

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MODES = {"bias_correction": True, "eps_inside_sqrt": False, "min_coeff": 0.01, "max_coeff": 10.0}


@pytest.fixture
def lamb(load_op):
    return load_op(FusedLambBuilder).lamb_step_


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


def _run(lamb, step_ops, param, grads, copies=(), grad_scale=1.0, offset=1, **modes):
    numel = param.numel()
    m, v, step = step_ops.zeros(numel, offset=offset), step_ops.zeros(numel, offset=offset), torch.tensor(0.0)
    coeffs = step_ops.zeros(1, offset=0)
    for grad in grads:
        numbers = {**NUMBERS, **MODES, **modes, "grad_scale": grad_scale}
        lamb([param], [grad], [m], [v], [step], list(copies), coeffs, **numbers)
    assert step.item() == len(grads)
    return m, v, coeffs[0]


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_equals_the_formula(lamb, step_ops, numel, dtypes, offset):
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, dtype=param_dtype, offset=offset)
    copies = [] if copy_dtype is None else [step_ops.zeros(numel, copy_dtype, offset=offset)]
    grads = [step_ops.numbers(numel, dtype=grad_dtype, seed=seed, offset=offset) for seed in (1, 2, 3)]
    if param_dtype != torch.float32:  # rounded after each step, which the formula is not
        grads = grads[:1]
    wanted = _reference(param.double(), [grad.double() * 0.37 for grad in grads], **NUMBERS, **MODES)
    m, v, ratio = _run(lamb, step_ops, param, grads, copies, grad_scale=0.37, offset=offset)
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


def test_each_of_many_tensors_has_its_own_ratio(lamb, step_ops):
    """More than one launch takes, of one chunk and of several; it is 1 without a norm."""
    sizes = [(3 * index) % 17 for index in range(step_ops.many)]
    sizes[60] = 20000
    params = [step_ops.numbers(size, seed=index) for index, size in enumerate(sizes)]
    params[3].zero_()
    grads = [step_ops.numbers(size, seed=index + 1) for index, size in enumerate(sizes)]
    wanted = [_reference(p.double(), [g.double()], **NUMBERS, **MODES) for p, g in zip(params, grads, strict=True)]
    moments = [[step_ops.zeros(size) for size in sizes] for _ in range(2)]
    steps, coeffs = [torch.tensor(0.0) for _ in sizes], step_ops.zeros(len(sizes))
    lamb(params, grads, *moments, steps, [], coeffs, **NUMBERS, **MODES, grad_scale=1.0)
    for found, ratio, (param, _, _, wanted_ratio) in zip(params, coeffs, wanted, strict=True):
        step_ops.assert_close(found, param.float())
        step_ops.assert_close(ratio, wanted_ratio.float())
    assert coeffs[3].item() == 1.0
    assert coeffs[0].item() == 1.0  # empty


def test_a_step_gives_the_same_bits_each_time(lamb, step_ops):
    results = []
    for _ in range(2):
        param = step_ops.numbers(65537)
        _run(lamb, step_ops, param, [step_ops.numbers(65537, seed=1)])
        results.append(param)
    assert torch.equal(*results)


def test_refuses_wrong_arguments_by_name(lamb, step_ops, device):
    lists = {name: [torch.ones(5, device=device)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]

    def call(coeffs=None, **given):
        coeffs = torch.zeros(len(given["params"]), device=device) if coeffs is None else coeffs
        lamb(**given, coeffs=coeffs, **NUMBERS, **MODES, grad_scale=1.0)

    step_ops.check_refusals(call, lists)
    for wrong, found in (
        (torch.zeros(2, device=device), r"shape \(2\)"),
        (torch.zeros(1, dtype=torch.float64, device=device), "dtype float64"),
        (torch.zeros(1, device="meta"), "a tensor on meta"),
    ):
        with pytest.raises(RuntimeError, match=rf"coeffs(\[0\])?: found {found}"):
            call(coeffs=wrong, **lists)


def test_a_step_under_capture_is_refused(lamb, step_ops, device):
    lists = {name: [torch.ones(5, device=device)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    coeffs = torch.zeros(1, device=device)
    step_ops.check_capture(lambda **given: lamb(**given, coeffs=coeffs, **NUMBERS, **MODES, grad_scale=1.0), lists)


def test_opcheck(lamb, step_ops):
    lists = [[step_ops.numbers(20)], [step_ops.numbers(20)], [step_ops.zeros(20)], [step_ops.zeros(20)]]
    arguments = (*lists, [torch.tensor(0.0)], [], step_ops.zeros(1))
    torch.library.opcheck(lamb.default, arguments, {**NUMBERS, **MODES, "grad_scale": 1.0})


@pytest.mark.usefixtures("in_force")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}])
def test_front_equals_its_reference(step_ops, monkeypatch, options):
    results = []
    for disabled in ("", "all"):
        monkeypatch.setenv("DS_OPS_DISABLE", disabled)
        param = Parameter(step_ops.numbers(70))
        optimizer = FusedLamb([param], lr=1e-2, **options)
        assert optimizer.takes_one_pass is (disabled == "" and not options)
        for seed in range(3):
            param.grad = step_ops.numbers(70, seed=seed)
            optimizer.step()
        results.append((param.detach(), torch.tensor(optimizer.get_lamb_coeffs())))
    for found, wanted in zip(*results, strict=True):
        step_ops.assert_close(found, wanted)
