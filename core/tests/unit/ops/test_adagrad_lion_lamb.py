"""Adagrad against torch's class; Lion and LAMB against their formulas in numpy."""

import copy
import inspect

import numpy as np
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon.muon import Muon

GRADS = np.random.default_rng(3).standard_normal((5, 12))
START = np.linspace(-1.5, 1.0, 12)


@pytest.fixture(autouse=True)
def _references_alone(monkeypatch):
    """Kernels have tests of their own, in the extension that brings them."""
    monkeypatch.setenv("DS_OPS_DISABLE", "all")


def _run(optimizer, param, grads=GRADS):
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=param.dtype).reshape(param.shape)
        optimizer.step()
    return param.detach().numpy()


def test_adagrad_is_bit_equal_to_torch():
    a, b = (torch.nn.Parameter(torch.tensor(START, dtype=torch.float32)) for _ in range(2))
    ours = DeepSpeedCPUAdagrad([a], lr=0.3, eps=1e-8, weight_decay=0.1)
    theirs = torch.optim.Adagrad([b], lr=0.3, eps=1e-8, weight_decay=0.1)
    np.testing.assert_array_equal(_run(ours, a), _run(theirs, b))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    np.testing.assert_array_equal(_run(ours, a), _run(theirs, b))


def test_adagrad_takes_replaced_groups_empty_tensors_and_sparse_gradients():
    embedding = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.zeros(3))], lr=0.5)
    empty = torch.nn.Parameter(torch.zeros(0))
    optimizer.param_groups[0]["params"] = [embedding, empty]
    embedding.grad = torch.sparse_coo_tensor([[2]], [[1.0, -4.0]], (4, 2), check_invariants=True)
    empty.grad = torch.zeros(0)
    with torch.sparse.check_sparse_tensor_invariants():
        optimizer.step()
    wanted = torch.zeros(4, 2)
    wanted[2] = torch.tensor([-0.5, 0.5])
    torch.testing.assert_close(embedding.detach(), wanted)


def test_adagrad_keeps_fp32_state_for_half_parameters():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdagrad([param], lr=0.1)
    _run_half(optimizer, param)
    assert optimizer.state[param]["sum"].dtype == torch.float32
    fresh = DeepSpeedCPUAdagrad([param], lr=0.1)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(fresh.state[param]["sum"], optimizer.state[param]["sum"])


def _run_half(optimizer, param):
    param.grad = torch.full((3,), 0.3, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("front", [FusedLion, DeepSpeedCPULion])
def test_lion_follows_the_paper(front):
    lr, (b1, b2), wd = 0.03, (0.9, 0.8), 0.2
    weights, m = START.copy(), np.zeros(12)
    for g in GRADS:
        weights = weights * (1 - lr * wd) - lr * np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
    param = torch.nn.Parameter(torch.tensor(START))
    optimizer = front([param], lr=lr, betas=(b1, b2), weight_decay=wd)
    np.testing.assert_allclose(_run(optimizer, param), weights, rtol=1e-12)
    np.testing.assert_allclose(optimizer.state[param]["exp_avg"].numpy(), m, rtol=1e-12)
    assert optimizer.state[param]["step"].item() == 5


def test_lion_keeps_fp32_state_for_half_parameters():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPULion([param], lr=0.25)
    _run_half(optimizer, param)
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(param, torch.full((3,), 0.5, dtype=torch.bfloat16))
    narrow = DeepSpeedCPULion([param], fp32_optimizer_states=False)
    _run_half(narrow, param)
    assert narrow.state[param]["exp_avg"].dtype == torch.bfloat16


def _numpy_lamb(layers, grads, lr, betas, eps, wd, corrected, inside, low, high):
    ratios = []
    moments = [(np.zeros_like(p), np.zeros_like(p)) for p in layers]
    for t, step_grads in enumerate(grads, start=1):
        for i, g in enumerate(step_grads):
            m = betas[0] * moments[i][0] + (1 - betas[0]) * g
            v = betas[1] * moments[i][1] + (1 - betas[1]) * g * g
            moments[i] = (m, v)
            m_hat = m / (1 - betas[0] ** t) if corrected else m
            v_hat = v / (1 - betas[1] ** t) if corrected else v
            u = m_hat / (np.sqrt(v_hat + eps) if inside else np.sqrt(v_hat) + eps) + wd * layers[i]
            p_norm, u_norm = np.linalg.norm(layers[i]), np.linalg.norm(u)
            r = min(high, max(low, p_norm / u_norm)) if p_norm > 0 and u_norm > 0 else 1.0
            layers[i] = layers[i] - lr * r * u
            ratios.append(r)
    return layers, ratios[-len(layers) :]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_lamb_follows_the_paper(corrected, inside):
    layers = [START.copy(), np.zeros(12), 50.0 * START]
    grads = [[g, 2 * g + 1, g[::-1].copy()] for g in GRADS]
    params = [torch.nn.Parameter(torch.tensor(layer)) for layer in layers]
    optimizer = FusedLamb(
        params,
        lr=0.02,
        betas=(0.8, 0.9),
        eps=1e-4,
        weight_decay=0.1,
        bias_correction=corrected,
        eps_inside_sqrt=inside,
        min_coeff=0.05,
        max_coeff=3.0,
    )
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = torch.tensor(grad)
        optimizer.step()
    wanted, ratios = _numpy_lamb(layers, grads, 0.02, (0.8, 0.9), 1e-4, 0.1, corrected, inside, 0.05, 3.0)
    for param, layer in zip(params, wanted, strict=True):
        np.testing.assert_allclose(param.detach().numpy(), layer, rtol=1e-6)
    np.testing.assert_allclose(optimizer.get_lamb_coeffs(), ratios, rtol=1e-5)
    assert ratios[2] == 3.0


def test_lamb_max_grad_norm_scales_all_gradients_together():
    def trained(scale, **arguments):
        params = [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([3.0]))]
        optimizer = FusedLamb(params, lr=0.1, eps=1.0, **arguments)
        params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]) * scale, torch.tensor([4.0]) * scale
        optimizer.step()
        return torch.cat([param.detach() for param in params])

    torch.testing.assert_close(trained(1.0, max_grad_norm=0.5), trained(0.1))
    torch.testing.assert_close(trained(1.0, max_grad_norm=7.0), trained(1.0))


def test_lamb_empty_tensor():
    param = torch.nn.Parameter(torch.zeros(0))
    param.grad = torch.zeros(0)
    optimizer = FusedLamb([param])
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: FusedLion(p, lr=-1), "^lr: found -1"),
        (lambda p: DeepSpeedCPULion(p, betas=(2.0, 0.1)), r"^betas\[0\]: found 2\.0"),
        (lambda p: FusedLamb(p, amsgrad=True), "^amsgrad: found True"),
        (lambda p: FusedLamb(p, max_coeff=0.1, min_coeff=1.0), r"^min_coeff: found 1\.0.*max_coeff=0\.1"),
        (lambda p: FusedLamb(p, max_grad_norm=-1.0), r"^max_grad_norm: found -1\.0"),
        (lambda p: DeepSpeedCPUAdagrad(p, eps=-1), "^eps: found -1"),
        (lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True), "^amsgrad: found True"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make([torch.nn.Parameter(torch.zeros(2))])


FRONTS = [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, FusedLamb, DeepSpeedCPUAdagrad, Muon]
WRONG = {
    "lr": ["a", "1e-3", None, True, [0.1], -1, float("nan"), float("inf"), torch.ones(2)],
    "eps": ["a", None, -1e-8, float("inf")],
    "weight_decay": ["a", None, -1, False, {}],
    "betas": [0.9, "ab", (0.9,), (0.9, 0.99, 0.999), (0.9, "a"), (None, 0.9), (0.9, 1.0), (-0.1, 0.9), {0.9: 0.99}],
    "bias_correction": ["no", 2, None],
    "adam_w_mode": ["no"],
    "adamw_mode": ["no"],
    "amsgrad": ["no"],
    "eps_inside_sqrt": ["no"],
    "max_grad_norm": ["a", -1],
    "max_coeff": ["a", None],
    "min_coeff": ["a", -1],
    "momentum": ["a", 1.0, None],
    "ns_steps": ["a", 0, 2.5, True],
    "nesterov": ["no"],
    "muon_lr": ["a"],
    "adam_lr": ["a"],
}


@pytest.mark.parametrize(
    ("front", "name"),
    [(front, name) for front in FRONTS for name in WRONG if name in inspect.signature(front).parameters],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_arguments_of_a_wrong_type_or_range_are_named(front, name):
    for value in WRONG[name]:
        told = rf"^{name}(\[\d\])?: found .*, but it must be "
        with pytest.raises(ConfigError, match=told):
            front([torch.nn.Parameter(torch.zeros(2, 2))], **{name: value})


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.__name__)
def test_options_of_a_group_are_looked_at_too(front):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    for name, value in {"lr": "a", "weight_decay": -1}.items():
        with pytest.raises(ConfigError, match=f"^{name}: found {value!r}, but it must be a"):
            front([{"params": [weight], name: value}])
        optimizer = front([weight])
        with pytest.raises(ConfigError, match=f"^{name}: found {value!r}, but it must be a"):
            optimizer.add_param_group(
                {"params": [torch.nn.Parameter(torch.zeros(2, 2))], "use_muon": True, name: value}
            )
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.__name__)
@pytest.mark.parametrize("params", [torch.nn.Linear(2, 2), torch.zeros(2), None, 3, "weights"])
def test_what_are_no_parameters_is_said(front, params):
    with pytest.raises(ConfigError, match=r"^params: found a .*; give model\.parameters\(\) or a list of param groups"):
        front(params)


def test_numbers_of_other_libraries_are_taken():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    for front in FRONTS:
        optimizer = front([weight], lr=np.float32(0.5), weight_decay=np.float64(0.0))
        optimizer.step()
        if front is not DeepSpeedCPUAdagrad:
            front([weight], lr=torch.tensor(0.5), betas=[0.5, np.float32(0.5)]).step()


@pytest.mark.parametrize("front", [FusedLion, FusedLamb])
def test_sparse_gradients_are_refused(front):
    param = torch.nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (4, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        front([param]).step()
