"""Whose forward runs: the tensor-parallel ranks of its model, and whether they have equal activations now.

Engines and divided models say so here, innermost last, for whoever keeps activations and is no part of the model
(`activation/`). A program may have several engines with different meshes, so the mesh of the engine that was built last
(`groups.py`) is only an answer where no forward of an engine runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from deepspeed.parallel import groups


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class RunningModel:
    """A model whose forward runs.

    tensor_group: gives the ranks over which its layers are divided.
    activations_differ: whether these ranks have different activations at the present place of the forward.
    end: called where its forward was left without `leave`, as by Ctrl-C, for which modules call no hooks.
    """

    tensor_group: Callable[[], ProcessGroup]
    activations_differ: Callable[[], bool] = _never
    end: Callable[[], None] = _nothing

    def in_backward(self) -> "RunningModel":
        """The model for what is computed again from here on: where activations differ, all that follow may."""
        return RunningModel(self.tensor_group, _always) if self.activations_differ() else self


_running: list[RunningModel] = []


def running_model() -> RunningModel:
    """The model whose forward runs; else one with the mesh that `deepspeed.utils.groups` answers from."""
    return _running[-1] if _running else RunningModel(groups._get_model_parallel_group)


@contextmanager
def running(model: RunningModel) -> Iterator[None]:
    """Inside, it is the forward of `model` that runs."""
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
    """A forward of `model` begins; `leave` is to follow."""
    _running.append(model)


def leave(model: RunningModel) -> None:
    """The forward has ended; nothing where it had not begun."""
    if model in _running:
        del _running[len(_running) - 1 - _running[::-1].index(model) :]
