"""Adam fronts against torch's own classes, and against the formulas written out in numpy."""

import copy

import numpy as np
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

SHAPES = [(7,), (3, 5), (0,), (1,)]


@pytest.fixture(autouse=True)
def _references_alone(monkeypatch):
    """Kernels have tests of their own, in the extension that brings them."""
    monkeypatch.setenv("DS_OPS_DISABLE", "all")


def _params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def _train(optimizer, params, num_steps=5, first_seed=1):
    for seed in range(first_seed, first_seed + num_steps):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def _numpy_adam(weights, grads, lr, betas, eps, wd, decoupled, corrected):
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    for t, g in enumerate(grads, start=1):
        if decoupled:
            weights = weights * (1 - lr * wd)
        else:
            g = g + wd * weights
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        c1 = 1 - betas[0] ** t if corrected else 1.0
        c2 = 1 - betas[1] ** t if corrected else 1.0
        weights = weights - lr * (m / c1) / (np.sqrt(v / c2) + eps)
    return weights


@pytest.mark.parametrize("front", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_is_bit_equal_to_torch_fused(front, decoupled):
    ours, theirs = _params(), _params()
    arguments = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    mode = "adam_w_mode" if front is FusedAdam else "adamw_mode"
    _train(front(ours, **arguments, **{mode: decoupled}), ours)
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    _train(torch_class(theirs, **arguments, fused=True), theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def _transposed(tensor):
    return tensor.t().contiguous().t()


def _every_second(tensor):
    return torch.stack((tensor, tensor), dim=-1).flatten(1)[:, ::2]


@pytest.mark.parametrize("front", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("kernel", [{}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lies", [_transposed, _every_second])
@pytest.mark.parametrize("whose", ["weight", "gradient", "moments"])
def test_tensors_that_lie_otherwise_in_memory_get_their_own_steps(front, kernel, dtype, lies, whose):
    """torch's fused kernel of the host pairs elements by their place in memory, and gave the steps of others."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = [torch.randn((4, 6), generator=generator).to(dtype) for _ in range(5)]
    weights = []
    for place in (torch.clone, lies):
        weight = torch.nn.Parameter(place(start) if whose == "weight" else start.clone())
        optimizer = front([{"params": [weight], **kernel}], lr=3e-2, weight_decay=0.1)
        for grad in grads:
            weight.grad = place(grad) if whose == "gradient" else grad.clone()
            optimizer.step()
            if whose == "moments":
                state = optimizer.state[weight]
                state.update({name: place(state[name]) for name in ("exp_avg", "exp_avg_sq")})
        weights.append(weight.detach())
    assert torch.allclose(*weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("front", [FusedAdam, DeepSpeedCPUAdam])
def test_a_model_may_become_channels_last_in_mid_run(front):
    weights = []
    for step_of_change in (None, 2):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3)
        optimizer = front(model.parameters(), lr=3e-2)
        for step in range(4):
            if step == step_of_change:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [{}, {"fused": False}, {"foreach": True}])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_follows_the_formula(kernel, decoupled, corrected):
    grads = np.random.default_rng(0).standard_normal((6, 11))
    start = np.linspace(-1, 1, 11)
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = FusedAdam(
        [{"params": [param], **kernel}],
        lr=0.05,
        betas=(0.7, 0.9),
        eps=1e-3,
        weight_decay=0.2,
        adam_w_mode=decoupled,
        bias_correction=corrected,
    )
    for grad in grads:
        param.grad = torch.tensor(grad)
        optimizer.step()
    wanted = _numpy_adam(start, grads, 0.05, (0.7, 0.9), 1e-3, 0.2, decoupled, corrected)
    np.testing.assert_allclose(param.detach().numpy(), wanted, rtol=1e-10)
    assert optimizer.state[param]["step"].item() == len(grads)


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_state_is_exchanged_with_torch(direction):
    a, b = _params(), _params()
    ours = FusedAdam(a, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(b, lr=1e-2, weight_decay=0.1, fused=True)
    first, second = (theirs, ours) if direction == "from torch" else (ours, theirs)
    first_params, second_params = (b, a) if direction == "from torch" else (a, b)
    _train(first, first_params, 3)
    with torch.no_grad():
        for target, source in zip(second_params, first_params, strict=True):
            target.copy_(source)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert set(second.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    _train(first, first_params, 3, first_seed=9)
    _train(second, second_params, 3, first_seed=9)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_groups_as_accelerate_hands_them_over():
    """Accelerate passes another optimizer's groups, with all of that optimizer's keys, and three arguments."""
    a, b = _params(), _params()
    groups = [{"params": b[:2], "lr": 0.5, "name": "first"}, {"params": b[2:], "weight_decay": 0.3}]
    source = torch.optim.AdamW([{**group, "params": a[:2] if i == 0 else a[2:]} for i, group in enumerate(groups)])
    ours = DeepSpeedCPUAdam(source.param_groups, lr=1e-2, weight_decay=0.0, adamw_mode=True)
    assert ours.param_groups[0]["name"] == "first"
    assert ours.param_groups[0]["lr"] == 0.5
    theirs = torch.optim.AdamW(groups, lr=1e-3, weight_decay=1e-2, fused=True)
    _train(ours, a)
    _train(theirs, b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_only_parameters_with_a_gradient_move_and_groups_may_be_replaced():
    params = _params()
    optimizer = FusedAdam(params, lr=0.1)
    flat = torch.nn.Parameter(torch.ones(6))
    optimizer.param_groups[0]["params"] = [flat, params[0]]
    flat.grad = torch.ones(6)
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before)
    torch.testing.assert_close(flat, torch.full((6,), 0.9))
    assert list(optimizer.state) == [flat]


def test_nothing_to_do_without_gradients():
    optimizer = FusedAdam(_params())
    optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("fp32_states", [True, False])
def test_half_parameters_with_fp32_state(fp32_states):
    params = _params(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(params, lr=1e-2, fp32_optimizer_states=fp32_states)
    _train(optimizer, params, 2)
    wanted = torch.float32 if fp32_states else torch.bfloat16
    assert optimizer.state[params[0]]["exp_avg"].dtype == wanted
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = DeepSpeedCPUAdam(_params(torch.bfloat16), lr=1e-2, fp32_optimizer_states=fp32_states)
    fresh.load_state_dict(saved)
    loaded = fresh.state[fresh.param_groups[0]["params"][0]]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(loaded[key], optimizer.state[params[0]][key])
    assert loaded["exp_avg"].dtype == wanted


def test_half_parameters_step_in_fp32():
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    wide = torch.nn.Parameter(param.detach().float())
    ours, reference = DeepSpeedCPUAdam([param], lr=0.1), torch.optim.AdamW([wide], lr=0.1, weight_decay=0, fused=True)
    grad = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
    param.grad, wide.grad = grad, grad.float()
    ours.step()
    reference.step()
    assert torch.equal(param, wide.bfloat16())


def test_amsgrad_is_torch_s():
    a, b = _params(), _params()
    _train(DeepSpeedCPUAdam(a, lr=0.1, amsgrad=True), a)
    _train(torch.optim.AdamW(b, lr=0.1, weight_decay=0.0, amsgrad=True, fused=True), b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ConfigError, match=r"amsgrad.*DeepSpeedCPUAdam"):
        FusedAdam(_params(), amsgrad=True)


def test_survives_a_copy():
    params = _params()
    optimizer = FusedAdam(params, lr=0.1, bias_correction=False, set_grad_none=False)
    _train(optimizer, params, 1)
    twin = copy.deepcopy(optimizer)
    twin_params = twin.param_groups[0]["params"]
    _train(optimizer, params, 2)
    _train(twin, twin_params, 2)
    assert all(torch.equal(x, y) for x, y in zip(params, twin_params, strict=True))
    twin.zero_grad()
    assert torch.equal(twin_params[0].grad, torch.zeros(7))
    twin.zero_grad(set_to_none=True)
    assert twin_params[0].grad is None


def test_closure_and_tensor_lr():
    param = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = FusedAdam([param], lr=torch.tensor(0.1))

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    torch.testing.assert_close(param.detach(), torch.tensor([1.9]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, r"^lr: found -1\.0.*at least 0"),
        ({"eps": float("nan")}, r"^eps: found nan"),
        ({"weight_decay": -0.1}, r"^weight_decay: found -0\.1"),
        ({"betas": (0.9, 1.0)}, r"^betas\[1\]: found 1\.0.*\[0, 1\)"),
    ],
)
def test_values_out_of_range_are_named(arguments, message):
    for front in (FusedAdam, DeepSpeedCPUAdam):
        with pytest.raises(ConfigError, match=message):
            front(_params(), **arguments)


def test_sparse_and_differentiable_are_refused():
    param = torch.nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (4, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        FusedAdam([param]).step()
    param.grad = torch.ones(4, 2)
    with pytest.raises(ConfigError, match="differentiable"):
        FusedAdam([{"params": [param], "differentiable": True}]).step()
