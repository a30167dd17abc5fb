"""The stack of models in their forward: their tensor-parallel ranks, and whether these have equal activations now; and
the tensors that a forward returns.

Engines and divided models push themselves here, innermost last, for code outside the model that saves activations
(`activation/`). A program may have several engines with different meshes, so the mesh of the engine that was built last
(`groups.py`) is used only if no engine's forward runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.distributed import ProcessGroup, get_rank

from deepspeed.parallel import groups


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class RunningModel:
    """A model in its forward.

    tensor_group: returns the process group over which its layers are divided.
    activations_differ: whether these ranks have different activations at the current place of the forward.
    end: called if the forward was left without `leave`, for example by Ctrl-C, since modules then call no hooks.
    """

    tensor_group: Callable[[], ProcessGroup]
    activations_differ: Callable[[], bool] = _never
    end: Callable[[], None] = _nothing

    def in_backward(self) -> "RunningModel":
        """Return the model for recomputation from here on: if activations differ here, later ones may differ, too."""
        return RunningModel(self.tensor_group, _always) if self.activations_differ() else self


_running: list[RunningModel] = []


def running_model() -> RunningModel:
    """Return the innermost model in its forward; if none, a model with the mesh of `deepspeed.utils.groups`."""
    return _running[-1] if _running else RunningModel(groups._get_model_parallel_group)


def tensor_rank() -> int:
    """Return this rank's tensor-parallel index in the innermost model in its forward; if none, in the mesh of
    `deepspeed.utils.groups`."""
    group = running_model().tensor_group
    return groups._get_model_parallel_rank() if group is groups._get_model_parallel_group else get_rank(group())


@contextmanager
def running(model: RunningModel) -> Iterator[None]:
    """Make `model` the running model inside this context."""
    number = len(_running)
    _running.append(model)
    try:
        yield
    finally:
        left = _running[number + 1 :]
        del _running[number:]
        for each in left:
            each.end()


def enter(model: RunningModel) -> None:
    """Begin a forward of `model`; call `leave` at its end."""
    _running.append(model)


def leave(model: RunningModel) -> None:
    """End the forward of `model`; does nothing if the forward had not begun."""
    if model in _running:
        del _running[len(_running) - 1 - _running[::-1].index(model) :]


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of containers; inside torch.func's transforms also the tensors they wrap."""
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
