"""When a backward begins and when it ends.

The engine knows both when the user calls `engine.backward(loss)`. With a plain `loss.backward()` it learns them from
autograd: a hook on the outputs of the forward sees the beginning, a callback of the autograd engine sees the end.

[Note: the end of a backward] A gradient hook cannot say "this was the last one": parameters may be unused, used
twice, or get several gradients when a checkpointed block runs a backward of its own inside the backward. Autograd's
`queue_callback` runs when the graph task in which it was queued is done. A callback queued from a parameter's hook
could belong to such an inner task and come too early; one queued from a hook on an output of the model belongs to the
outermost task. So the outputs are watched, and a parameter's hook opens the window only when no output was seen.

    IDLE --open--> OPEN --close | abort--> IDLE
"""

import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import StateError


class Window(enum.Enum):
    IDLE = enum.auto()
    OPEN = enum.auto()


#: the moves that are legal; `BackwardWindow._move` is the only writer of the state
LEGAL_MOVES = {(Window.IDLE, Window.OPEN), (Window.OPEN, Window.IDLE)}


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
        self.state = Window.IDLE
        self._on_begin, self._on_end, self._on_abort = on_begin, on_end, on_abort

    @property
    def is_open(self) -> bool:
        return self.state is Window.OPEN

    def open(self) -> None:
        """The engine is about to call `loss.backward()`."""
        if self.is_open:  # what is open was left by an exception inside autograd
            self.abort()
        self._move(Window.OPEN)
        self._on_begin(False)

    def open_from_autograd(self) -> None:
        """A hook runs inside a backward that the engine did not start."""
        if self.is_open:
            return
        self._move(Window.OPEN)
        self._on_begin(True)
        torch.autograd.Variable._execution_engine.queue_callback(self.close)

    def close(self) -> None:
        if not self.is_open:  # aborted in between
            return
        self._move(Window.IDLE)
        self._on_end()

    def abort(self) -> None:
        """Drop a backward that did not reach its end."""
        if self.is_open:
            self._move(Window.IDLE)
            self._on_abort()

    def watch(self, outputs: Any) -> None:
        """Open the window when a backward reaches one of the tensors in `outputs` (any nesting of containers)."""
        for tensor in _tensors(outputs):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._see_output)

    def _see_output(self, grad: Tensor) -> None:
        self.open_from_autograd()

    def _move(self, to: Window) -> None:
        if (self.state, to) not in LEGAL_MOVES:
            raise StateError(f"backward window: {self.state.name} -> {to.name} is not a legal move")
        self.state = to


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):  # ModelOutput of transformers is one
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from _tensors(getattr(outputs, name))
