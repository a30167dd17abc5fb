"""Every backward of this process passes one function of torch's in Python, around which `see_calls` puts another.

So a plain `loss.backward()` that fails on this rank is known as it fails, not when the engine is called next. Peers
wait for this rank in the reduction of its gradients, or in collectives of the model, and a program that catches the
exception may never call the engine again. Autograd has no callback for a backward that fails. Here the exception is at
hand, for the peers to hear why.

Whose backward it was: that of an engine which has seen it begin and not end, and of each engine whose outputs or
parameters are in its graph, since it may have failed before it came to them.

And the tensors are at hand that a running backward began from, for `runs_unscaled` to judge all of its paths.
`backward_roots` checks those that `engine.backward` is given.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import Node

from deepspeed.comm.give_up import on_failure_after
from deepspeed.errors import counted
from deepspeed.zero.backward_window import BackwardWindow, is_in_backward, is_scaled_for, window_of_output
from deepspeed.zero.managed import manager_of

_NAME = "_engine_run_backward"
# what autograd and torch's operators say of a tensor that has become empty and 1-D
_OF_SHAPES = re.compile(
    r"size of tensor|invalid gradient|expected shape|must be a matrix|Dimension out of range|1-D tensor"
)
_windows: WeakSet[BackwardWindow] = WeakSet()
#: what each running backward began from, by a number of its call; also one inside of another, or on another thread
_roots: dict[object, Iterable[Any]] = {}


def see_calls(window: BackwardWindow) -> None:
    """From now on a backward of this engine that fails ends the window at once. Called when an engine is built."""
    _windows.add(window)
    on_failure_after(_end)
    former = getattr(torch.autograd, _NAME, None)
    if former is None or hasattr(former, "_is_of_zero"):
        return  # torch may rename it: then the next call of the engine finds that a backward has failed
    for module in (torch.autograd.graph, torch.autograd):  # torch.compiler puts back what the first of them has
        setattr(module, _NAME, _seeing(former))


def _seeing(former: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(former)
    def run(outputs: Any, *args: Any, **keys: Any) -> Any:
        call = object()
        _roots[call] = outputs
        try:
            return former(outputs, *args, **keys)
        except BaseException:
            if not is_in_backward():  # else it may be caught inside the outer one
                _end(outputs if keys.get("accumulate_grad", True) else ())
            raise
        finally:
            del _roots[call]

    run._is_of_zero = True  # type: ignore[attr-defined]
    return run


def _end(outputs: Iterable[Any]) -> None:
    """The exception that is being handled has ended a backward from `outputs`."""
    failed = {window for window in _windows if window.is_left} | {
        window for node in _nodes(outputs) if (window := _window_of(node)) is not None
    }
    for window in failed & set(_windows):
        window.fail()


def runs_unscaled(window: BackwardWindow) -> bool:
    """Whether a running backward comes to this engine's outputs or parameters past every loss that it has scaled."""
    return any(
        _window_of(node) is window
        for outputs in list(_roots.values())
        for node in _nodes(outputs, until=functools.partial(is_scaled_for, window))
    )


def _window_of(node: Node) -> BackwardWindow | None:
    """The window of the engine of which the node made an output or has a parameter; graphs outlive the backward."""
    if (window := window_of_output(node)) is not None:
        return window
    manager = manager_of(param) if isinstance(param := getattr(node, "variable", None), Tensor) else None
    return None if manager is None else manager.gradients.window


def _nodes(outputs: Iterable[Any], *, until: Callable[[Node], bool] = lambda node: False) -> Iterator[Node]:
    """The nodes of the graph below `outputs`, but for those for which `until` holds, and what only they lead to."""
    todo = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    seen: set[Node | None] = {None}
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            assert node is not None
            if not until(node):
                yield node
                todo += [following for following, _ in node.next_functions]


def backward_roots(
    loss: Tensor | Sequence[Tensor], gradient: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors at which a backward begins, and the gradient of each; None: it is a scalar, whose gradient is 1.

    Args:
        loss: a tensor or several; each requires a gradient.
        gradient: of `loss`, and like it one or several, of the same shapes. A tensor of one element needs none.

    Raises:
        ValueError: says what was found.
    """
    tensors = [loss] if isinstance(loss, Tensor) or not isinstance(loss, Sequence) else list(loss)
    gradients = list(gradient) if isinstance(gradient, Sequence) else [gradient] * len(tensors)
    if not tensors or len(gradients) != len(tensors) or (isinstance(gradient, Tensor) and len(tensors) > 1):
        raise ValueError(
            f"backward: found {counted(len(tensors), 'tensor')} and {counted(_count(gradient), 'gradient')}; pass one "
            "or more tensors and a list with a gradient (or None) for each"
        )
    for tensor, grad in zip(tensors, gradients, strict=True):
        _check(tensor, grad)
    return tensors, gradients


def _check(tensor: Any, grad: Any) -> None:
    if not isinstance(tensor, Tensor) or not tensor.requires_grad or (grad is None and tensor.numel() != 1):
        raise ValueError(
            "backward: asked for the gradients of one loss, found "
            + (f"a tensor of shape {tuple(tensor.shape)}, requires_grad={tensor.requires_grad}"
               if isinstance(tensor, Tensor) else type(tensor).__name__)
            + "; pass a scalar loss that was computed from the engine's output, or gradient= for another tensor"
        )  # fmt: skip
    if grad is not None and (not isinstance(grad, Tensor) or grad.shape != tensor.shape):
        found = f"one of shape {tuple(grad.shape)}" if isinstance(grad, Tensor) else type(grad).__name__
        raise ValueError(f"backward: wanted a gradient of its tensor's shape {tuple(tensor.shape)}, found {found}")


def add_gathering_hint(error: Exception) -> None:
    """Append what to do to the message of `error` where a backward may have failed over a parameter that is sharded."""
    if type(error) in (RuntimeError, IndexError) and _OF_SHAPES.search(str(error)):
        hint = (
            "stage 3: if the loss has a term that reads parameters in GatheredParameters, they are sharded again; call "
            "engine.backward within the same context, or compute the term in the module's forward"
        )
        error.args = (f"{error}; {hint}", *error.args[1:])


def _count(gradient: Any) -> int:
    return len(gradient) if isinstance(gradient, Sequence) else int(gradient is not None)
