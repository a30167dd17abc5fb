"""`BackwardWindow` detects when a backward begins and when it ends.

The engine knows both when the user calls `engine.backward(loss)`. With a plain `loss.backward()` it learns them from
autograd: a hook on the outputs of the forward detects the beginning, a callback of the autograd engine detects the end.

[Note: the end of a backward] A gradient hook cannot know that it is the last one: parameters may be unused, used
twice, or get several gradients when a checkpointed block runs a backward of its own inside the backward. Autograd's
`queue_callback` runs the callback when the graph task in which it was queued is done. A callback queued from a
parameter's hook could belong to such an inner task and run too early. A callback queued from a hook on an output of
the model belongs to the outermost task. So the window watches the outputs, and a parameter's hook opens the window only
if no output hook has run. A forward inside a backward (a reentrant checkpoint around the whole model) gets its own
backward in an inner task, while the forward itself runs in the outer task. So the forward queues the callback in the
outer task, even without gradients. The window then opens in the inner task that has the first gradient.

[Note: running or left] An exception ends a backward without running its callback. The engine's own `backward` sees the
exception; `see_calls` catches the exception of a plain `loss.backward()`. If autograd's engine was called in another
way, the callback object shows it: autograd's graph task holds the only reference to the callback, so the callback is
freed exactly when the task is, whether the task succeeded or failed.

    IDLE --open--> OPEN --close | abort--> IDLE

Every backward of this process calls one Python function of torch, which `see_calls` wraps.

So a failing `loss.backward()` is noticed at once, not at the next call of the engine. This matters because peers wait
for this rank in the reduction of its gradients or in collectives of the model, and a program that catches the exception
may never call the engine again. Autograd has no callback for a failed backward. The wrapper has the exception, so peers
can be given the reason.

A failed backward is attributed to each engine whose window is left open, and to each engine whose outputs or parameters
are in the graph, since the backward may have failed before it reached them.

The wrapper also records the tensors from which a running backward began, so that `runs_unscaled` can check all paths.
`backward_roots` checks the tensors that the user passes to `engine.backward`.
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
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import Node

from deepspeed.comm.give_up import on_failure_after
from deepspeed.errors import StateError, counted
from deepspeed.parallel.running import tensors_in
from deepspeed.zero.managed import manager_of


class WindowState(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()


#: the legal moves; `BackwardWindow._move` is the only writer of the state
LEGAL_MOVES = {(WindowState.IDLE, WindowState.OPEN), (WindowState.OPEN, WindowState.IDLE)}


# metadata key on the autograd node of an output: its window
_MARK = "deepspeed_window"
# metadata key on the autograd node of a loss: the window of the engine that scaled the loss
_SCALED = "deepspeed_scaled_for"
#: the graph task's id that torch returns outside of a backward
_NO_GRAPH_TASK = -1


def is_in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


class BackwardWindow:
    """Calls `on_begin(by_user)` once when a backward begins and `on_end()` once when it ends.

    Args:
        on_begin: gets True if autograd opened the window, that is in a plain `loss.backward()`.
        on_end: called when all gradients are in place.
        on_abort: called when an exception ended the backward.
    """

    def __init__(
        self, on_begin: Callable[[bool], None], on_end: Callable[[], None], on_abort: Callable[[], None]
    ) -> None:
        self.state = WindowState.IDLE
        #: one value: whether the window is open and no exception has ended its backward; read by hooks
        self.running = [False]
        self._on_begin, self._on_end, self._on_abort = on_begin, on_end, on_abort
        self._itself = weakref.ref(self)
        self._see_output = _output_hook(self._itself)
        self._task_end: weakref.ref[_TaskEnd] | None = None  # None: the engine opens and closes the window
        self._is_unseen = False

    @property
    def is_running(self) -> bool:
        return self.running[0]

    @property
    def is_open(self) -> bool:
        return self.state is WindowState.OPEN

    @property
    def is_engines(self) -> bool:
        """Whether the engine's own backward opened the window."""
        return self.is_open and self._task_end is None

    @property
    def is_left(self) -> bool:
        """Whether an exception has ended a plain `loss.backward()`."""
        return self.is_open and not self.is_running

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the window for the engine's own `loss.backward()`. An exception aborts; otherwise the caller closes."""
        self.open()
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def open(self) -> None:
        """Open the window; the engine is about to call `loss.backward()`.

        Raises:
            StateError: if a backward is already running.
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
        """Open the window from a hook inside a backward that the engine did not start."""
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
        """Ignore backwards that do not compute the gradients of a step: no hook opens the window."""
        self._is_unseen = True
        try:
            yield
        finally:
            self._is_unseen = False

    def open_and_close(self) -> None:
        """Open and close the window for a finished backward that no hook saw."""
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
        """Close the window if `end` was queued for its current backward; autograd has finished the graph task."""
        if self._task_end is not None and self._task_end() is end:
            self.close()

    def abort(self) -> None:
        """Drop a backward that did not reach its end."""
        if self.is_open:
            self._move(WindowState.IDLE)
            self._on_abort()

    def fail(self) -> None:
        """Abort a plain backward that an exception ended, even if it had not reached this window yet. A backward of the
        engine is left alone, since the engine sees the exception itself."""
        if self.is_engines:
            return
        self.abort() if self.is_open else self._on_abort()

    def abort_if_left(self) -> None:
        """Drop a plain `loss.backward()` that an exception ended; a running backward goes on."""
        if self.is_left:
            self.abort()

    def begin_forward(self) -> None:
        """Prepare for a forward of the module. Inside a running backward, queue the callback for its end."""
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
        """Call `saw` whenever a backward runs through `loss`, which the engine scaled; see `is_scaled_for`.

        Args:
            saw: the graph holds it; it must not keep an engine alive.
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
    """Return a hook that opens the window when a backward reaches an output. The graph holds the hook, and the hook
    holds only a weak reference, so a tensor that the user keeps does not keep the engine alive."""

    def call(grad: Tensor) -> None:
        owner = window()
        if owner is not None:
            owner.open_from_autograd()

    return call


def window_of_output(node: Node) -> BackwardWindow | None:
    """Return the window of the engine whose forward output was made by `node`, or None if there is none alive."""
    own = _metadata(node).get(_MARK)
    return None if own is None else own()


def is_scaled_for(window: BackwardWindow, node: Node) -> bool:
    """Return whether `node` made a loss that the engine with this window scaled."""
    own = _metadata(node).get(_SCALED)
    return own is not None and own() is window


def _metadata(node: Node | None) -> dict[str, "weakref.ref[BackwardWindow]"]:
    """Return a dict that lives as long as the node; torch's stub declares it as a method."""
    return node.metadata  # type: ignore[union-attr, return-value]


class _TaskEnd:
    """Autograd's callback at the end of a graph task, which owns it; see [Note: running or left]."""

    def __init__(self, window: BackwardWindow) -> None:
        self._window = window

    def __call__(self) -> None:
        self._window.end_of_task(self)


_NAME = "_engine_run_backward"
# error messages of autograd and torch's operators about a tensor that has become empty and 1-D
_OF_SHAPES = re.compile(
    r"size of tensor|invalid gradient|expected shape|must be a matrix|Dimension out of range|1-D tensor"
)
_windows: WeakSet[BackwardWindow] = WeakSet()
#: the root tensors of each running backward, by a key per call; backwards may be nested or on other threads
_roots: dict[object, Iterable[Any]] = {}


def see_calls(window: BackwardWindow) -> None:
    """End the window at once when a backward of this engine fails. Called when an engine is built."""
    _windows.add(window)
    on_failure_after(_end)
    former = getattr(torch.autograd, _NAME, None)
    if former is None or hasattr(former, "_is_of_zero"):
        return  # torch may rename it; then the next call of the engine finds the failed backward
    for module in (torch.autograd.graph, torch.autograd):  # torch.compiler restores the function of the first module
        setattr(module, _NAME, _seeing(former))


def _seeing(former: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(former)
    def run(outputs: Any, *args: Any, **keys: Any) -> Any:
        call = object()
        _roots[call] = outputs
        try:
            return former(outputs, *args, **keys)
        except BaseException:
            if not is_in_backward():  # else the outer backward may catch it
                _end(outputs if keys.get("accumulate_grad", True) else ())
            raise
        finally:
            del _roots[call]

    run._is_of_zero = True  # type: ignore[attr-defined]
    return run


def _end(outputs: Iterable[Any]) -> None:
    """Fail the windows of the backward from `outputs` that the current exception has ended."""
    failed = {window for window in _windows if window.is_left} | {
        window for node in _nodes(outputs) if (window := _window_of(node)) is not None
    }
    for window in failed & set(_windows):
        window.fail()


def runs_unscaled(window: BackwardWindow) -> bool:
    """Return whether a running backward reaches this engine's outputs or parameters without passing a scaled loss."""
    return any(
        _window_of(node) is window
        for outputs in list(_roots.values())
        for node in _nodes(outputs, until=functools.partial(is_scaled_for, window))
    )


def _window_of(node: Node) -> BackwardWindow | None:
    """Return the window of the engine to which the node's output or parameter belongs; graphs outlive the backward."""
    if (window := window_of_output(node)) is not None:
        return window
    manager = manager_of(param) if isinstance(param := getattr(node, "variable", None), Tensor) else None
    return None if manager is None else manager.gradients.window


def _nodes(outputs: Iterable[Any], *, until: Callable[[Node], bool] = lambda node: False) -> Iterator[Node]:
    """Yield the nodes of the graph below `outputs`; do not enter nodes for which `until` holds."""
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
    """Return the tensors at which a backward begins and their gradients; None stands for a gradient of 1 (a scalar).

    Args:
        loss: one tensor or several; each requires a gradient.
        gradient: one gradient or several, with the shapes of `loss`. Optional for a tensor of one element.

    Raises:
        ValueError: names the number, types or shapes that were found.
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
    """Append a hint to the message of `error` if the backward may have failed because a parameter is sharded."""
    if type(error) in (RuntimeError, IndexError) and _OF_SHAPES.search(str(error)):
        hint = (
            "stage 3: if the loss has a term that reads parameters in GatheredParameters, they are sharded again; call "
            "engine.backward within the same context, or compute the term in the module's forward"
        )
        error.args = (f"{error}; {hint}", *error.args[1:])


def _count(gradient: Any) -> int:
    return len(gradient) if isinstance(gradient, Sequence) else int(gradient is not None)
