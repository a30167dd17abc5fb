"""When a backward begins and ends: the table of moves, and what autograd does with it."""

from dataclasses import dataclass

import pytest
import torch
from deepspeed.errors import StateError
from deepspeed.zero.backward_window import LEGAL_MOVES, BackwardWindow, WindowState
from torch.utils.checkpoint import checkpoint


class Log:
    def __init__(self):
        self.events = []
        self.window = BackwardWindow(
            lambda by_user: self.events.append(("begin", by_user)),
            lambda: self.events.append("end"),
            lambda: self.events.append("abort"),
        )


@pytest.fixture
def log():
    return Log()


@pytest.mark.parametrize("before", list(WindowState))
@pytest.mark.parametrize("after", list(WindowState))
def test_the_table_of_moves(log, before, after):
    log.window.state = before
    if (before, after) in LEGAL_MOVES:
        log.window._move(after)
        assert log.window.state is after
    else:
        with pytest.raises(StateError, match=f"{before.name} -> {after.name} is not a legal move"):
            log.window._move(after)
        assert log.window.state is before


def test_every_state_can_be_entered_and_left():
    assert {before for before, _ in LEGAL_MOVES} == {after for _, after in LEGAL_MOVES} == set(WindowState)


def test_the_engines_open_and_close(log):
    log.window.open()
    assert log.window.is_open
    log.window.close()
    log.window.close()  # harmless
    assert log.events == [("begin", False), "end"]


def test_abort_drops_and_is_harmless_when_idle(log):
    log.window.abort()
    log.window.open()
    log.window.abort()
    log.window.close()  # the autograd callback of a backward that was aborted in between
    assert log.events == [("begin", False), "abort"]


def test_the_engines_backward_is_dropped_by_its_exception(log):
    with pytest.raises(KeyboardInterrupt), log.window.opened():
        raise KeyboardInterrupt
    assert log.events == [("begin", False), "abort"]


def test_the_engines_backward_inside_a_running_one_is_refused(log):
    log.window.open()
    log.window.abort_if_left()
    with pytest.raises(StateError, match="inside a running backward"):
        log.window.open()
    assert log.events == [("begin", False)]


def test_a_plain_backward_opens_and_closes_once(log):
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    outputs = (hidden.sum(), {"more": [hidden.mean()]})
    log.window.watch(outputs)
    (outputs[0] + outputs[1]["more"][0]).backward()
    assert log.events == [("begin", True), "end"]


def test_the_end_comes_after_the_last_gradient(log):
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: log.events.append("grad"))
    loss = (weight * 2).sum()
    log.window.watch(loss)
    loss.backward()
    assert log.events == [("begin", True), "grad", "end"]


def test_two_backwards_are_two_windows(log):
    weight = torch.ones(3, requires_grad=True)
    first, second = (weight * 2).sum(), (weight * 3).sum()
    log.window.watch([first, second])
    first.backward()
    second.backward()
    assert log.events == [("begin", True), "end"] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoints_inner_backward_does_not_end_it(log, use_reentrant):
    inner, outer = (torch.ones(3, requires_grad=True) for _ in range(2))
    for name, weight in (("inner", inner), ("outer", outer)):
        weight.register_post_accumulate_grad_hook(lambda _, name=name: log.events.append(name))
    x = torch.ones(3, requires_grad=True)
    hidden = checkpoint(lambda t: t * inner, x * outer, use_reentrant=use_reentrant)
    loss = hidden.sum()
    log.window.watch(loss)
    loss.backward()
    assert log.events == [("begin", True), "inner", "outer", "end"]


def test_inside_the_engines_window_autograd_opens_nothing(log):
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    log.window.watch(loss)
    log.window.open()
    loss.backward()
    assert log.window.is_open
    log.window.close()
    assert log.events == [("begin", False), "end"]


def leave_a_backward(log):
    """Returns the exception, whose traceback lives on as in a debugger."""

    def fail(grad):
        raise RuntimeError("in the middle")

    hidden = torch.ones(3, requires_grad=True) * 2
    hidden.register_hook(fail)
    loss = hidden.sum()
    log.window.watch(loss)
    with pytest.raises(RuntimeError, match="in the middle") as left:
        loss.backward()
    assert log.window.is_open
    return left


def test_a_backward_left_by_an_exception_is_dropped_before_the_next(log):
    left = leave_a_backward(log)
    log.window.abort_if_left()
    assert not log.window.is_open
    leave_a_backward(log)
    log.window.open()
    log.window.close()
    leave_a_backward(log)
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    log.window.watch(loss)
    loss.backward()
    dropped = [("begin", True), "abort"]
    assert log.events == [*dropped, *dropped, ("begin", False), "end", *dropped, ("begin", True), "end"]
    del left


def test_a_running_backward_is_not_dropped(log):
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    log.window.watch(loss)
    loss.grad_fn.register_hook(lambda *_: log.window.abort_if_left())
    loss.backward()
    assert log.events == [("begin", True), "end"]


def rerun(function, depth):
    """`function` under `depth` reentrant checkpoints."""
    return function if depth == 0 else lambda x: checkpoint(rerun(function, depth - 1), x, use_reentrant=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_forward_inside_a_backward_ends_with_the_outermost_task(log, depth):
    """Checkpoints around the module: each has an inner backward, and all of it is one window."""

    def forward(x):
        log.window.begin_forward()
        output = x * weight
        log.window.watch(output)
        return output

    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: log.events.append("grad"))
    x = torch.ones(3, requires_grad=True)
    sum(rerun(forward, depth)(x).sum() for _ in range(2)).backward()
    assert log.events == [("begin", True), "grad", "grad", "end"]


def test_a_forward_inside_a_backward_that_is_not_the_modules_opens_nothing(log):
    """An evaluation in a hook of another model's loss."""
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    loss.register_hook(lambda _: log.window.begin_forward())
    loss.backward()
    assert log.events == []
    log.window.open()
    log.window.close()
    assert log.events == [("begin", False), "end"]


def test_the_engines_backward_inside_another_models(log):
    """The end that a forward queued in the other backward does not close a later window."""
    weight = torch.ones(3, requires_grad=True)
    outer = (torch.ones(3, requires_grad=True) * 2).sum()

    def train(_):
        with torch.enable_grad():
            log.window.begin_forward()
            loss = (weight * 2).sum()
            log.window.watch(loss)
            with log.window.opened():
                loss.backward()
            log.window.close()

    outer.register_hook(train)
    outer.backward()
    assert log.events == [("begin", False), "end"]


@dataclass
class Output:
    loss: torch.Tensor
    name: str = "x"


def test_outputs_of_any_nesting_are_watched(log):
    weight = torch.ones(3, requires_grad=True)
    for wrap in (lambda t: t, lambda t: [t], lambda t: (1, {"a": t}), Output):
        loss = (weight * 2).sum()
        log.window.watch(wrap(loss))
        loss.backward()
    assert log.events == [("begin", True), "end"] * 4


def test_outputs_without_gradient_are_left_alone(log):
    leaf = torch.ones(3, requires_grad=True)
    log.window.watch([torch.ones(2), leaf, None, "text"])
    leaf.sum().backward()
    assert log.events == []
