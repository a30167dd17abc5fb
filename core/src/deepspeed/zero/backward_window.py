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
exception, and `backward_calls.py` that of a plain `loss.backward()`. For what calls autograd's engine in another way
the callback object itself is the sign: autograd's graph task holds the only reference to it, so it is gone exactly when
the task is, whether the task ended well or not.

    IDLE --open--> OPEN --close | abort--> IDLE
"""

import enum
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from deepspeed.errors import StateError


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
            if tensor.requires_grad and not tensor.is_leaf:
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
    if isinstance(outputs, Tensor):
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
