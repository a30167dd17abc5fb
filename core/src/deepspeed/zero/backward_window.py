"""When a backward begins and when it ends.

The engine knows both when the user calls `engine.backward(loss)`. With a plain `loss.backward()` it learns them from
autograd: a hook on the outputs of the forward sees the beginning, a callback of the autograd engine sees the end.

[Note: the end of a backward] A gradient hook cannot say "this was the last one": parameters may be unused, used
twice, or get several gradients when a checkpointed block runs a backward of its own inside the backward. Autograd's
`queue_callback` runs when the graph task in which it was queued is done. A callback queued from a parameter's hook
could belong to such an inner task and come too early; one queued from a hook on an output of the model belongs to the
outermost task. So the outputs are watched, and a parameter's hook opens the window only when no output was seen.
A forward inside a backward (a reentrant checkpoint around the whole model) gets a backward of its own, in an inner
task, and runs itself in the outer one. So it queues the callback there, even without gradients: of nested checkpoints
only that forward runs in the outermost task. The window then opens in whichever inner task has the first gradient.

[Note: running or left] An exception ends a backward without its callback. The engine's own `backward` sees the
exception, and `see_calls` that of a plain `loss.backward()`. For what calls autograd's engine in another way
the callback object itself is the sign: autograd's graph task holds the only reference to it, so it is gone exactly when
the task is, whether the task ended well or not.

    IDLE --open--> OPEN --close | abort--> IDLE

Every backward of this process passes one function of torch's in Python, around which `see_calls` puts another.

So a plain `loss.backward()` that fails on this rank is known as it fails, not when the engine is called next. Peers
wait for this rank in the reduction of its gradients, or in collectives of the model, and a program that catches the
exception may never call the engine again. Autograd has no callback for a backward that fails. Here the exception is at
hand, for the peers to hear why.

Whose backward it was: that of an engine which has seen it begin and not end, and of each engine whose outputs or
parameters are in its graph, since it may have failed before it came to them.

And the tensors are at hand that a running backward began from, for `runs_unscaled` to judge all of its paths.
`backward_roots` checks those that `engine.backward` is given.
"""

import enum
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.graph import Node

from deepspeed.comm.give_up import on_failure_after
from deepspeed.errors import StateError, counted
from deepspeed.zero.managed import manager_of


class WindowState(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()


#: the moves that are legal; `BackwardWindow._move` is the only writer of the state
LEGAL_MOVES = {(WindowState.IDLE, WindowState.OPEN), (WindowState.OPEN, WindowState.IDLE)}


# by which the node of an output has its window, among what torch lets users keep with a node
_MARK = "deepspeed_window"
# by which the node of a loss has the window of the engine that has scaled it
_SCALED = "deepspeed_scaled_for"
#: what torch gives as the graph task's id outside of a backward
_NO_GRAPH_TASK = -1


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


class BackwardWindow:
    """Calls `on_begin(by_user)` once when a backward begins and `on_end()` once when it ends.

    Args:
        on_begin: gets True when the window was opened by autograd, that is by a plain `loss.backward()`.
        on_end: called with all gradients in place.
        on_abort: called when a backward was left by an exception.
    """

    def __init__(
        self, on_begin: Callable[[bool], None], on_end: Callable[[], None], on_abort: Callable[[], None]
    ) -> None:
        self.state = WindowState.IDLE
        #: one value: it is open, and its backward was not left by an exception; for hooks that look at nothing else
        self.running = [False]
        self._on_begin, self._on_end, self._on_abort = on_begin, on_end, on_abort
        self._itself = weakref.ref(self)
        self._see_output = _output_hook(self._itself)
        self._task_end: weakref.ref[_TaskEnd] | None = None  # None: the engine opened the window, and closes it
        self._is_unseen = False

    @property
    def is_running(self) -> bool:
        return self.running[0]

    @property
    def is_open(self) -> bool:
        return self.state is WindowState.OPEN

    @property
    def is_engines(self) -> bool:
        """Whether the engine's own backward has opened it."""
        return self.is_open and self._task_end is None

    @property
    def is_left(self) -> bool:
        """Whether an exception has ended a plain `loss.backward()`."""
        return self.is_open and not self.is_running

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the window for the engine's own `loss.backward()`; an exception aborts, else `close()` is to follow."""
        self.open()
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def open(self) -> None:
        """The engine is about to call `loss.backward()`.

        Raises:
            StateError: inside a running backward.
        """
        self.abort_if_left()
        if self.is_open:
            raise StateError(
                "backward: found engine.backward() inside a running backward of the same engine; add the losses up "
                "and call engine.backward(loss) once"
            )
        self._task_end = None
        self._begin(by_user=False)

    def open_from_autograd(self) -> None:
        """A hook runs inside a backward that the engine did not start."""
        if self._is_unseen:
            return
        self.abort_if_left()
        if self.is_open:
            return
        if not self._has_task_end():
            self._queue_end()
        self._begin(by_user=True)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Enclose what differentiates a loss for another end than the gradients of a step: no hook opens the window."""
        self._is_unseen = True
        try:
            yield
        finally:
            self._is_unseen = False

    def open_and_close(self) -> None:
        """A backward is over that nothing has seen."""
        self._task_end = None
        self._begin(by_user=True)
        self.close()

    def _begin(self, *, by_user: bool) -> None:
        self._move(WindowState.OPEN)
        try:
            self._on_begin(by_user)
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        if not self.is_open:  # aborted in between
            return
        self._move(WindowState.IDLE)
        self._on_end()

    def end_of_task(self, end: "_TaskEnd") -> None:
        """Autograd has run everything; closes the window if it is still the one that `end` was queued for."""
        if self._task_end is not None and self._task_end() is end:
            self.close()

    def abort(self) -> None:
        """Drop a backward that did not reach its end."""
        if self.is_open:
            self._move(WindowState.IDLE)
            self._on_abort()

    def fail(self) -> None:
        """A backward that an exception ended was this one's, whether it had come here or not; not for one of the
        engine's own, which sees the exception itself."""
        if self.is_engines:
            return
        self.abort() if self.is_open else self._on_abort()

    def abort_if_left(self) -> None:
        """Drop a plain `loss.backward()` that an exception ended; one that is running goes on."""
        if self.is_left:
            self.abort()

    def begin_forward(self) -> None:
        """The module's forward begins, maybe inside a running backward, whose end is then the window's."""
        self.abort_if_left()
        if is_in_backward() and not self.is_open and not self._has_task_end():
            self._queue_end()

    def watch(self, outputs: Any) -> None:
        """Open the window when a backward reaches one of the tensors in `outputs` (any nesting of containers)."""
        see, own = self._see_output, self._itself
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not (tensor.is_leaf or is_functorch_wrapped_tensor(tensor)):
                tensor.register_hook(see)
                _metadata(tensor.grad_fn)[_MARK] = own

    def watch_scaled(self, loss: Tensor, saw: Callable[[], None]) -> None:
        """Call `saw` whenever a backward runs through `loss`, which the engine has scaled; see `is_scaled_for`.

        Args:
            saw: is held by the graph, and keeps no engine alive.
        """
        loss.register_hook(lambda grad: saw())
        _metadata(loss.grad_fn)[_SCALED] = self._itself

    def _has_task_end(self) -> bool:
        """Whether the end of a running backward is queued."""
        return self._task_end is not None and self._task_end() is not None

    def _queue_end(self) -> None:
        end = _TaskEnd(self)
        self._task_end = weakref.ref(end, self._see_task_gone)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _see_task_gone(self, end: "weakref.ref[_TaskEnd]") -> None:
        if end is self._task_end:
            self.running[0] = False

    def _move(self, to: WindowState) -> None:
        if (self.state, to) not in LEGAL_MOVES:
            raise StateError(f"backward window: {self.state.name} -> {to.name} is not a legal move")
        self.state = to
        self.running[0] = to is WindowState.OPEN


def _output_hook(window: "weakref.ref[BackwardWindow]") -> Callable[[Tensor], None]:
    """Called when a backward reaches an output. The graph holds it, and an engine that nothing else refers to is not
    kept alive by a tensor that somebody keeps."""

    def call(grad: Tensor) -> None:
        owner = window()
        if owner is not None:
            owner.open_from_autograd()

    return call


def window_of_output(node: Node) -> BackwardWindow | None:
    """The window of the engine, if it lives, whose forward gave an output that `node` of a graph made."""
    own = _metadata(node).get(_MARK)
    return None if own is None else own()


def is_scaled_for(window: BackwardWindow, node: Node) -> bool:
    """Whether `node` of a graph made a loss that the engine with this window has scaled."""
    own = _metadata(node).get(_SCALED)
    return own is not None and own() is window


def _metadata(node: Node | None) -> dict[str, "weakref.ref[BackwardWindow]"]:
    """A dict that lives as long as the node; torch's stub has it as a method."""
    return node.metadata  # type: ignore[union-attr, return-value]


class _TaskEnd:
    """Autograd's callback at the end of a graph task, which owns it; see [Note: running or left]."""

    def __init__(self, window: BackwardWindow) -> None:
        self._window = window

    def __call__(self) -> None:
        self._window.end_of_task(self)


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of containers, and within torch.func's transforms those that they wrap."""
    if isinstance(outputs, Tensor):
        yield outputs
        while is_functorch_wrapped_tensor(outputs):
            outputs = get_unwrapped(outputs)
            yield outputs
    elif isinstance(outputs, dict):  # ModelOutput of transformers is one
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from tensors_in(value)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from tensors_in(getattr(outputs, name))


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
