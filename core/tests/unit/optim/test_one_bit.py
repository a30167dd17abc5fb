"""1-bit optimizers in one process: their formulas where nothing is sent, their options, and when they send what."""

import copy
from types import SimpleNamespace

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.lamb import FusedLamb
from deepspeed.optim import create_optimizer, one_bit
from deepspeed.optim.one_bit import OnebitAdam, OneBitOptimizer
from deepspeed.optim.one_bit_lamb import OnebitLamb
from deepspeed.optim.zero_one_adam import ZeroOneAdam, is_sync_due, is_variance_due, num_variances

CLASSES = (OnebitAdam, OnebitLamb, ZeroOneAdam)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((4, 3), (3,))]


def step(optimizer, params, number):
    generator = torch.Generator().manual_seed(number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def trained(optimizer_class, num_steps, params=None, **options):
    params = params or parameters()
    if issubclass(optimizer_class, OneBitOptimizer):
        options = {"bias_correction": True, **options}
    optimizer = optimizer_class(params, lr=0.05, **options)
    for number in range(num_steps):
        step(optimizer, params, number)
    return params, optimizer


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"betas": (0.8, 0.9), "eps": 1e-3}])
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_the_first_phase_is_adamw(name, options):
    cls, extra = {"OnebitAdam": (OnebitAdam, {}), "ZeroOneAdam": (ZeroOneAdam, {"var_update_scaler": 100})}[name]
    plain, _ = trained(torch.optim.AdamW, 10, **{"weight_decay": 0.0, **options})
    params, _ = trained(cls, 10, **options, **extra)
    for param, wanted in zip(params, plain, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6)


def test_the_first_phase_of_lamb_is_lamb():
    plain, _ = trained(FusedLamb, 10, weight_decay=0.1)
    params, optimizer = trained(OnebitLamb, 10, weight_decay=0.1)
    for param, wanted in zip(params, plain, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6)
    assert len(optimizer.get_lamb_coeffs()) == 2


def test_the_second_moment_stays_after_freeze_step():
    params, optimizer = trained(OnebitAdam, 5, freeze_step=5)
    before = [optimizer.state[param]["exp_avg_sq"].clone() for param in params]
    for number in range(5, 8):
        step(optimizer, params, number)
    assert all(map(torch.equal, before, (optimizer.state[param]["exp_avg_sq"] for param in params)))
    assert optimizer.keeps_gradients


@pytest.mark.parametrize("corrects", [True, False])
def test_without_bias_correction_moments_are_taken_as_they_are(corrects):
    params, _ = trained(OnebitAdam, 1, bias_correction=corrects, eps=0.0)
    moved = (parameters()[0] - params[0]).abs()
    wanted = 0.05 * (1.0 if corrects else 0.1 / 0.001**0.5)
    torch.testing.assert_close(moved, torch.full_like(moved, wanted), rtol=1e-3, atol=1e-5)


def test_eps_inside_the_root():
    params, _ = trained(OnebitAdam, 1, eps=0.5, eps_inside_sqrt=True)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn((4, 3), generator=generator)
    torch.testing.assert_close(params[0].detach(), parameters()[0].detach() - 0.05 * grad / (grad**2 + 0.5).sqrt())


@pytest.mark.parametrize("cls", CLASSES)
def test_what_never_had_a_gradient_stays(cls):
    key = "var_freeze_step" if cls is ZeroOneAdam else "freeze_step"
    params = parameters()
    optimizer = cls(params, lr=0.05, **{key: 2})
    start = params[0].detach().clone()
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        params[0].grad[1] = 0 if number < 2 else 1.0
        optimizer.step()
    assert torch.equal(params[0][1], start[1])
    assert not torch.equal(params[0][0], start[0])


def test_a_mask_keeps_momentum_at_zero():
    first, second = parameters()
    mask = torch.ones(4, 3)
    mask[2] = 0
    optimizer = OnebitAdam([{"params": [first], "exp_avg_mask": mask}, {"params": [second]}], lr=0.05, freeze_step=1)
    for number in range(3):
        step(optimizer, [first, second], number)
    assert not optimizer.state[first]["exp_avg"][2].any()
    assert bool(optimizer.state[first]["exp_avg"][1].all())


def test_a_mask_that_comes_late_is_no_gradient_of_lamb():
    params, optimizer = trained(OnebitLamb, 4, freeze_step=2)
    optimizer.param_groups[0]["exp_avg_mask"] = torch.zeros(())
    fresh = [optimizer.state[param]["exp_avg_sq_fresh"].clone() for param in params]
    step(optimizer, params, 4)
    for param, before in zip(params, fresh, strict=True):
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq_fresh"], 0.999 * before)


def test_a_load_that_lacks_rounding_errors_of_a_parameter_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(one_bit, "warn_once", said.append)
    params, optimizer = trained(OnebitAdam, 3, freeze_step=2)
    optimizer.join(SimpleNamespace(rank=0, world_size=2))
    errors = {param: [torch.ones(param.numel()), torch.ones(8)] for param in params}
    optimizer.restore_rounding(errors)
    assert said == []
    optimizer.restore_rounding({**errors, params[1]: None})
    assert "of 2 ranks in what was loaded, for 1 of 2 trained parameters" in said[0]


@pytest.mark.parametrize("cls", CLASSES)
def test_what_first_trains_after_the_freeze_stays_and_is_named(cls, monkeypatch):
    said = []
    monkeypatch.setattr(one_bit, "warn_once", said.append)
    key = "var_freeze_step" if cls is ZeroOneAdam else "freeze_step"
    (first, _), optimizer = trained(cls, 2, **{key: 2}, weight_decay=0.1)
    late = torch.ones(7, requires_grad=True)
    optimizer.add_param_group({"params": [late]})
    for number in range(2, 5):
        step(optimizer, [first, late], number)
    assert bool((late == 1).all())
    assert late not in optimizer.state
    assert f"param_groups[1] (shapes: (7,)) whose first gradient came after {key} 2" in said[0]


@pytest.mark.parametrize("cls", [OnebitAdam, ZeroOneAdam])
def test_the_bias_is_that_of_the_updates_a_parameter_has_had(cls):
    """Its moments are those of its own updates, so each of its steps with one gradient is lr."""
    options = {"freeze_step": 4} if cls is OnebitAdam else {"var_freeze_step": 4, "local_step_clipper": 1}
    every, rare = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = cls([every, rare], lr=0.05, bias_correction=True, eps=0.0, **options)
    for number in range(10):
        before = rare.detach().clone()
        every.grad = torch.ones(3)
        rare.grad = torch.ones(3) if number in (3, 6, 8) else None
        optimizer.step()
        if rare.grad is not None:
            torch.testing.assert_close(before - rare, torch.full((3,), 0.05))
    assert int(optimizer.state[rare]["variance_step"]) == 1
    assert int(optimizer.state[rare]["step"]) == 3


@pytest.mark.parametrize("cls", CLASSES)
def test_states_that_do_not_count_variances_go_on_by_their_updates(cls):
    key = "var_freeze_step" if cls is ZeroOneAdam else "freeze_step"
    params, optimizer = trained(cls, 5, **{key: 3})
    copies = [param.detach().clone().requires_grad_() for param in params]
    other = cls(copies, lr=0.05, bias_correction=True, **{key: 3})
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["variance_step"]
    other.load_state_dict(saved)
    for number in range(5, 8):
        step(optimizer, params, number)
        step(other, copies, number)
    assert all(map(torch.equal, params, copies))


def test_when_zero_one_adam_sends_what():
    assert [t for t in range(1, 20) if is_variance_due(t, 4)] == [1, 2, 3, 4, 5, 7, 9, 11, 13, 17]
    for scaler in (1, 3, 16):
        due = [is_variance_due(t, scaler) for t in range(1, 500)]
        assert [num_variances(t, scaler) for t in range(1, 500)] == [sum(due[:t]) for t in range(1, 500)]
    assert [t for t in range(1, 25) if is_sync_due(t, 6, 4)] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24]
    assert all(is_sync_due(t, 5, 1) for t in range(1, 100))


def test_local_steps_of_one_rank_lose_nothing():
    """Where nobody else is, what a meeting of the ranks makes of the weights is what they were."""
    keys = {"var_freeze_step": 4, "weight_decay": 0.1}
    every, other = trained(ZeroOneAdam, 6, **keys, local_step_clipper=1)
    rarely, optimizer = trained(ZeroOneAdam, 6, **keys, local_step_scaler=1, local_step_clipper=4)
    assert optimizer._local == {}
    for number, num_moving in ((6, 2), (7, 0)):  # of an interval of 4 updates, which ends with the second one
        step(other, every, number)
        step(optimizer, rarely, number)
        assert len(optimizer._local) == num_moving
        for param, wanted in zip(rarely, every, strict=True):
            torch.testing.assert_close(param, wanted)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad: found True"),
        ({"max_grad_norm": 1.0}, "max_grad_norm: found 1.0.*gradient_clipping"),
        ({"lr": -1}, "lr: found -1"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]: found 1.0"),
    ],
)
def test_options_out_of_range_are_refused(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls(parameters(), **options)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (OnebitAdam, {"freeze_step": 1.5}, "freeze_step: found 1.5, but it must be an integer of at least 1"),
        (OnebitAdam, {"freeze_step": 0}, "freeze_step: found 0"),
        (ZeroOneAdam, {"var_freeze_step": 0}, "var_freeze_step: found 0"),
        (ZeroOneAdam, {"local_step_clipper": 0}, "local_step_clipper: found 0, .* at least 1"),
        (ZeroOneAdam, {"var_update_scaler": True}, "var_update_scaler: found True"),
        (OnebitLamb, {"factor_min": 5.0}, r"factor_min: found 5.0, but it must be in \[0, factor_max 4.0\]"),
        (OnebitLamb, {"coeff_beta": 2}, "coeff_beta: found 2"),
    ],
)
def test_counts_and_bounds(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls(parameters(), **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_state_dicts_go_to_another_optimizer(cls):
    key = "var_freeze_step" if cls is ZeroOneAdam else "freeze_step"
    params, optimizer = trained(cls, 5, **{key: 3})
    copies = [param.detach().clone().requires_grad_() for param in params]
    other = cls(copies, lr=0.05, **{key: 3})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(5, 8):
        step(optimizer, params, number)
        step(other, copies, number)
    assert all(map(torch.equal, params, copies))


@pytest.mark.parametrize("kind", ["OneBitAdam", "onebitlamb", "ZeroOneAdam"])
def test_a_configuration_of_deepspeeds_pages_is_taken(kind):
    params = {"lr": 1e-3, "cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": False}
    optimizer = create_optimizer(kind, params, parameters())
    assert isinstance(optimizer, CLASSES)
    assert optimizer.defaults["bias_correction"] is False


@pytest.mark.parametrize("cls", CLASSES)
def test_the_bias_is_not_corrected_by_default(cls):
    """As in DeepSpeed 0.19.6, whose argument has no effect."""
    assert cls(parameters()).defaults["bias_correction"] is False
