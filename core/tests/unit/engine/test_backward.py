"""Backwards besides that of one loss: of outputs whose backward began elsewhere, of several tensors, and of what is
computed from parameters without a forward."""

import copy
import itertools

import deepspeed
import pytest
import torch
from deepspeed.errors import StateError
from deepspeed.log import warn_once
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
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
        (lambda h: [h, h.sum()], torch.ones(2, 3), "found 2 tensors and 1 gradient;"),
        (lambda h: [h], [], "found 1 tensor and 0 gradients"),
        (lambda h: [h, h.sum()], None, r"shape \(2, 3\)"),
        (lambda h: [], None, "found 0 tensors"),
    ],
)
def test_what_does_not_fit(make_engine, tensors, gradient, message):
    engine = make_engine(halves()[0])
    given = tensors(engine(X))
    with pytest.raises(ValueError, match=f"backward: .*{message}"):
        engine.backward(given, gradient=gradient)
    assert not engine.sharding.gradients.window.is_open


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_allow_untested_optimizer": True}
every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def plain_step(net, *losses):
    """One step of torch's SGD with the sum of the gradients of the losses; returns the weights."""
    for loss in losses:
        loss(net).backward()
    return [param.detach() - param.grad for param in net.parameters()]


def of_small_bias(net):
    return 3.0 * net[2].bias.square().sum()


def of_all_weights(net):
    return 0.5 * sum(param.square().sum() for param in net.parameters())


def of_output(net):
    return net(X).square().sum()


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2))


@every_stage
@pytest.mark.parametrize("loss", [of_small_bias, of_all_weights])
def test_a_loss_of_parameters_alone(make_engine, stage, loss):
    engine = make_engine(small_net(), zero_optimization={"stage": stage}, **SGD)
    loss(engine.module).backward()
    engine.step()
    expected = small_net()
    loss(expected).backward()
    for param, reference in zip(engine.module.parameters(), expected.parameters(), strict=True):
        change = 0.0 if reference.grad is None else reference.grad
        torch.testing.assert_close(param.detach(), reference.detach() - change)


@pytest.mark.parametrize(("stage", "comes_first"), [(0, True), *itertools.product([1, 2, 3], [True, False])])
def test_a_loss_of_a_small_parameter_beside_that_of_the_output(make_engine, stage, comes_first):
    """Of two accumulated micro-batches; the plain backward is divided by their number as `engine.backward` is."""
    keys = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine = make_engine(small_net(), zero_optimization={"stage": stage}, **keys, **SGD)
    net = engine.module
    for _ in range(2):
        if comes_first:
            of_small_bias(net).backward()
        engine.backward(engine(X).square().sum())
        if not comes_first:
            of_small_bias(net).backward()
        engine.step()
    for param, expected in zip(net.parameters(), plain_step(small_net(), of_output, of_small_bias), strict=True):
        torch.testing.assert_close(param.detach(), expected)


@pytest.mark.parametrize("loss", [of_small_bias, of_all_weights])
def test_a_later_loss_of_parameters_alone_is_refused_where_gradients_are_shown(make_engine, loss):
    engine = make_engine(small_net(), **SGD)
    engine.backward(engine(X).square().sum())
    with pytest.raises(StateError, match="a second backward before step"):
        loss(engine.module).backward()
    engine.backward(engine(X).square().sum())
    engine.step()
    for param, expected in zip(engine.module.parameters(), plain_step(small_net(), of_output), strict=True):
        torch.testing.assert_close(param.detach(), expected)


@every_stage
def test_the_gradient_of_a_small_parameter_is_got_and_replaced(make_engine, stage):
    engine = make_engine(small_net(), zero_optimization={"stage": stage}, **SGD)
    weight, bias = engine.module[0].weight, engine.module[2].bias
    before = weight.detach().clone(), bias.detach().clone()
    of_small_bias(engine.module).backward()
    torch.testing.assert_close(safe_get_full_grad(bias), 6.0 * before[1])
    safe_set_full_grad(weight, torch.ones(3, 4))
    engine.step()
    torch.testing.assert_close((weight.detach(), bias.detach()), (before[0] - 1.0, -5.0 * before[1]))


@every_stage
def test_a_group_is_not_added_while_there_is_a_gradient(make_engine, stage):
    engine = make_engine(small_net(), zero_optimization={"stage": stage}, **SGD)
    of_small_bias(engine.module).backward()
    with pytest.raises(StateError, match="add_param_group: found gradients"):
        engine.optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_set_by_hand(make_engine, stage):
    engine = make_engine(small_net(), zero_optimization={"stage": stage}, **SGD)
    before = [param.detach().clone() for param in engine.module.parameters()]
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, 0.5)
    engine.step()
    for param, weight in zip(engine.module.parameters(), before, strict=True):
        torch.testing.assert_close(param.detach(), weight - 0.5)


def by_autograd_engine(loss):
    """As libraries do that do without `torch.autograd.backward`."""
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    run_backward((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


@pytest.mark.parametrize("backward", [torch.Tensor.backward, by_autograd_engine])
def test_what_an_exception_left_is_not_mixed_with_the_next_gradients(make_engine, backward):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("planted")

    engine = make_engine(small_net(), zero_optimization={"stage": 1}, **SGD)
    first, rest = engine.module[0], engine.module[2:]
    expected = plain_step(small_net(), of_all_weights)

    def fail():
        hidden = Fails.apply(first(X))
        output = engine(X)  # its backward comes first
        with pytest.raises(ArithmeticError):
            backward(output.sum() + rest(hidden).sum())

    fail()
    if backward is by_autograd_engine:
        with pytest.raises(StateError, match=r"backward that an exception ended; call engine.zero_grad"):
            of_all_weights(engine.module).backward()
        engine.zero_grad()
    of_all_weights(engine.module).backward()
    engine.step()
    for param, weight in zip(engine.module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.detach(), weight)


def test_a_backward_that_cannot_begin_is_not_running(make_engine, monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("planted")

    engine = make_engine(small_net(), **SGD)
    engine.backward(engine(X).square().sum())
    monkeypatch.setattr(torch.optim.SGD, "step", fail)
    with pytest.raises(ArithmeticError):
        engine.step()
    for _ in range(2):
        with pytest.raises(StateError, match="the last step failed inside its update"):
            engine.backward(engine(X).square().sum())


def test_a_schedule_that_fails_is_no_step_to_go_on_from(make_engine, monkeypatch):
    """The weights were updated, and the count and the learning rate were not."""

    def fail(*_, **__):
        raise ArithmeticError("planted")

    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = make_engine(small_net(), scheduler=schedule, **SGD)
    engine.backward(engine(X).square().sum())
    monkeypatch.setattr(engine.lr_scheduler, "step", fail)
    with pytest.raises(ArithmeticError):
        engine.step()
    with pytest.raises(StateError, match=r"the last step failed inside its update \(planted\)"):
        engine.backward(engine(X).square().sum())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("what", ["nothing", "module", "engine", "optimizer"])
def test_zero_grad_drops_what_it_says(make_engine, lines, stage, accumulation, what):
    """The module's own drops what is shown: at stage 0 after the last backward. Elsewhere it says that it does not."""
    warn_once.cache_clear()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    before = [param.detach().clone() for param in net.parameters()]
    engine = make_engine(
        net,
        arguments={"optimizer": torch.optim.SGD(net.parameters(), lr=1.0)},
        optimizer=None,
        train_batch_size=accumulation,
        gradient_accumulation_steps=accumulation,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )
    net.zero_grad()  # before there is one
    engine.backward(engine(torch.ones(1, 4)).sum())
    if accumulation == 2:
        engine.step()
    if what != "nothing":
        {"module": net, "engine": engine, "optimizer": engine.optimizer}[what].zero_grad()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    net.zero_grad()  # after step
    is_shown = stage == 0 and accumulation == 1
    drops = what in ("engine", "optimizer") or (what == "module" and is_shown)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        moved = (before[1] - net.bias.detach())[0].item()
    assert moved == (1 if drops else 2) / accumulation
    warned = [text for level, text in lines if level == "WARNING" and "module.zero_grad(): found gradients" in text]
    assert len(warned) == (what == "module" and not is_shown)
    engine.destroy()
    assert "zero_grad" not in vars(net)


def test_a_copy_of_a_module_has_its_own_zero_grad(make_engine):
    net = make_engine(torch.nn.Linear(4, 2)).module
    other = copy.deepcopy(net)
    other.weight.grad = torch.ones(2, 4)
    other.zero_grad()
    assert other.weight.grad is None
    assert vars(other)["zero_grad"].__self__ is other
