"""`safe_get_*` and `safe_set_*` over one rank, in every stage; ranks tests do the same over several."""

import pytest
import torch
from deepspeed.zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
)
from torch import nn

X = torch.arange(16.0).view(4, 4) / 16
SETTINGS = [(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]


@pytest.fixture(params=SETTINGS, ids=[f"stage{stage}-{dtype}" for stage, dtype in SETTINGS])
def engine(make_engine, monkeypatch, request):
    monkeypatch.setattr("deepspeed.zero.units.WIDENED_NUMEL", 3)  # several pieces per parameter
    stage, dtype = request.param
    torch.manual_seed(0)
    low = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    return make_engine(
        nn.Linear(4, 2), zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0}, **low
    )


def run_backward(engine):
    engine.backward(engine(X.to(engine.module.weight.dtype)).float().sum())


def test_the_weight_in_fp32(engine):
    weight = engine.module.weight
    full = safe_get_full_fp32_param(weight)
    assert (full.dtype, full.shape) == (torch.float32, weight.shape)
    torch.manual_seed(0)
    assert torch.equal(full, nn.Linear(4, 2).weight)
    safe_set_full_fp32_param(weight, torch.full_like(full, 1 / 3))
    assert torch.equal(weight, torch.full_like(weight, 1 / 3))
    assert torch.equal(safe_get_full_fp32_param(weight), torch.full_like(full, 1 / 3))


def test_the_gradient(engine):
    weight, bias = engine.module.weight, engine.module.bias
    assert safe_get_full_grad(weight) is None
    run_backward(engine)
    grad = safe_get_full_grad(weight)
    assert grad.shape == weight.shape
    torch.testing.assert_close(grad.float(), X.sum(0).expand(2, 4), rtol=1e-2, atol=0)
    assert safe_get_full_grad(bias).tolist() == [4.0, 4.0]


def test_gradients_are_given_in_fp32_and_taken_in_any_type(engine):
    """Widened from what is kept; what is set is rounded to that."""
    weight = engine.module.weight
    run_backward(engine)
    kept = X.to(weight.dtype).sum(0).float().expand(2, 4)
    for get in (safe_get_full_grad, safe_get_local_grad):
        assert get(weight).dtype is torch.float32
        torch.testing.assert_close(get(weight).view(2, 4), kept, rtol=1e-2, atol=0)
    for dtype in (torch.float32, weight.dtype):
        value = torch.full((2, 4), 1 / 3, dtype=dtype)
        for set_to, get in ((safe_set_full_grad, safe_get_full_grad), (safe_set_local_grad, safe_get_local_grad)):
            set_to(weight, value)
            assert get(weight).dtype is torch.float32
            assert torch.equal(get(weight).view(2, 4), value.to(weight.dtype).float())
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx((32 + 8 / 9) ** 0.5, rel=1e-2)


def test_a_changed_gradient_is_the_one_that_counts(engine):
    weight = engine.module.weight
    run_backward(engine)
    safe_set_full_grad(weight, torch.zeros(2, 4))
    assert safe_get_full_grad(weight).abs().sum() == 0
    before = safe_get_full_fp32_param(weight).clone()
    bias_before = safe_get_full_fp32_param(engine.module.bias).clone()
    engine.step()
    assert torch.equal(safe_get_full_fp32_param(weight), before)
    assert not torch.equal(safe_get_full_fp32_param(engine.module.bias), bias_before)


def test_the_optimizers_state(engine):
    weight = engine.module.weight
    assert safe_get_full_optimizer_state(weight, "exp_avg") is None
    run_backward(engine)
    engine.step()
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    torch.testing.assert_close(moment, 0.1 * X.sum(0).expand(2, 4), rtol=1e-2, atol=0)
    assert safe_get_full_optimizer_state(weight, "no_such_state") is None
    safe_set_full_optimizer_state(weight, torch.zeros(2, 4), "exp_avg")
    assert safe_get_full_optimizer_state(weight, "exp_avg").abs().sum() == 0


def test_what_is_no_tensor(engine):
    with pytest.raises(TypeError, match="safe_set_full_fp32_param: found list, wanted a tensor"):
        safe_set_full_fp32_param(engine.module.weight, [1.0, 2.0])


def test_a_parameter_that_nobody_manages(engine):
    alone = nn.Parameter(torch.ones(2))
    assert safe_get_full_fp32_param(alone) is None
    assert safe_get_full_optimizer_state(alone, "exp_avg") is None
    assert safe_get_full_grad(alone) is None
    for setter in (safe_set_full_fp32_param, safe_set_full_grad):
        with pytest.raises(KeyError, match=rf"{setter.__name__}: no engine manages this parameter of shape \(2,\)"):
            setter(alone, torch.ones(2))
    with pytest.raises(KeyError, match="safe_set_full_optimizer_state"):
        safe_set_full_optimizer_state(alone, torch.ones(2), "exp_avg")
