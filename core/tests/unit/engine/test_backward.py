"""`engine.backward` of tensors with gradients: an output whose backward began elsewhere, and several at once."""

import pytest
import torch
from torch import nn

X = torch.arange(8.0).view(2, 4) / 8


def halves():
    torch.manual_seed(0)
    return nn.Linear(4, 3), nn.Linear(3, 1)


def expected(factor=1.0):
    """Gradients of the first half's weight and bias, with the two as one graph."""
    first, second = halves()
    (factor * second(first(X).tanh()).square().sum()).backward()
    return first.weight.grad, first.bias.grad


def begin_elsewhere(hidden, second):
    """The gradient of the loss with respect to `hidden`, as a later stage sends it back."""
    received = hidden.detach().float().requires_grad_()
    second(received.tanh()).square().sum().backward()
    return received.grad


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_output_of_a_first_half(make_engine, stage):
    first, second = halves()
    keys = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
    engine = make_engine(first, zero_optimization={"stage": stage}, **keys)
    before = first.weight.detach().clone()
    hidden = engine(X)
    assert engine.backward(hidden, gradient=begin_elsewhere(hidden, second)) is hidden
    engine.step()
    torch.testing.assert_close(before - first.weight, expected()[0])


def test_it_is_scaled_and_divided_like_a_loss(make_engine):
    first, second = halves()
    keys = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "loss_scale": 64}}
    engine = make_engine(first, **keys)
    for _ in range(2):
        hidden = engine(X.half())
        engine.backward(hidden, gradient=begin_elsewhere(hidden, second).half())
        engine.step()
    norm = torch.cat([grad.flatten() for grad in expected()]).norm()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-2)


def test_several_tensors_in_one_backward(make_engine):
    first, second = halves()
    engine = make_engine(first, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    before = first.weight.detach().clone()
    hidden = engine(X)
    loss = 2.0 * second(hidden.tanh()).square().sum()
    given = [hidden, loss]
    assert engine.backward(given, gradient=[begin_elsewhere(hidden, second), None]) == given
    engine.step()
    torch.testing.assert_close(before - first.weight, expected(3.0)[0])


@pytest.mark.parametrize(
    ("tensors", "gradient", "message"),
    [
        (lambda h: h, None, r"found a tensor of shape \(2, 3\), requires_grad=True; .*gradient="),
        (lambda h: h, torch.ones(3), r"its tensor's shape \(2, 3\), found one of shape \(3,\)"),
        (lambda h: h, 1.0, r"its tensor's shape \(2, 3\), found float"),
        (lambda h: h.detach(), torch.ones(2, 3), "requires_grad=False"),
        (lambda h: [h, h.sum()], torch.ones(2, 3), "found 2 tensors and 1 gradients"),
        (lambda h: [h], [], "found 1 tensors and 0 gradients"),
        (lambda h: [h, h.sum()], None, r"shape \(2, 3\)"),
        (lambda h: [], None, "found 0 tensors"),
    ],
)
def test_what_does_not_fit(make_engine, tensors, gradient, message):
    engine = make_engine(halves()[0])
    given = tensors(engine(X))
    with pytest.raises(ValueError, match=f"backward: .*{message}"):
        engine.backward(given, gradient=gradient)
    assert not engine.sharding.window.is_open
