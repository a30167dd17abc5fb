"""Schedules: in which order the engine runs forwards, backwards and the optimizer step.

A schedule yields instructions and keeps no tensor; `training.py` carries them out. With gradient accumulation
(`Accumulation`) the training loop is the user's: the calls `engine(x)` and `engine.backward(loss)` are the instructions
`Forward` and `Backward` of one micro-batch, and `engine.step()` carries out what follows them.

[Note: a schedule of a pipeline] Its loop is the engine's: it yields the instructions of all micro-batches of a batch in
the order of its stage, with others between them, such as one that sends activations (`pipe/schedule.py`, in DeepSpeed's
words). `pipe/stage.py` finds the handler of each by its type. What follows the last backward is the same: this schedule
is then at a boundary, and its `ReduceGradients` and `Step` are carried out as in every engine (`engine/pipeline.py`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the module on one micro-batch."""

    micro: int  # number of the micro-batch, over the whole run


@dataclass(frozen=True, slots=True)
class Backward:
    """Accumulate the gradients of one micro-batch."""

    micro: int


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Reduce what was accumulated over the ranks. It starts inside the backward before it, where it can overlap."""


@dataclass(frozen=True, slots=True)
class Step:
    """Judge the gradients and update the weights."""


Instruction = Forward | Backward | ReduceGradients | Step


class Schedule(Protocol):
    """What `training.py` asks."""

    num_steps: int  # micro-batches per optimizer step
    micro_steps: int  # micro-batches so far; a loaded checkpoint sets it

    @property
    def syncs(self) -> bool:
        """Whether the ranks reduce; else backwards only accumulate, whatever the stage."""
        ...

    def instructions(self) -> Iterator[Instruction]:
        """What is to be done until `advance`, in order; asked again, the same again."""
        ...

    def advance(self) -> None:
        """The instructions have been carried out."""
        ...

    def restart(self) -> None:
        """What was accumulated since the last step is lost: the step begins again."""
        ...


class Accumulation:
    """Gradient accumulation: a forward and a backward per micro-batch; after the last one of a step, the step.

    Micro-batches are counted from the last step on, not from the beginning of the run, during which `num_steps` may
    change.

    Args:
        num_steps: micro-batches per optimizer step (`gradient_accumulation_steps`).
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._micro_steps = 0
        self._step_began = 0  # `micro_steps` at that time
        self._boundary: bool | None = None  # set by the user, instead of counting
        self._syncs = True

    def instructions(self) -> Iterator[Instruction]:
        """Of the current micro-batch."""
        yield Forward(self.micro_steps)
        yield Backward(self.micro_steps)
        if self._syncs and self.is_boundary():
            yield ReduceGradients()
            yield Step()

    def advance(self) -> None:
        ends = self._syncs and self.is_boundary()
        self._micro_steps += 1
        if ends:
            self.restart()

    def restart(self) -> None:
        self._step_began = self._micro_steps

    def count_batch(self) -> None:
        """A pipeline is about to step, with all micro-batches of the step at once; `advance` counts one of them."""
        self._micro_steps += self.num_steps - 1

    @property
    def micro_steps(self) -> int:
        """Micro-batches since the beginning of the run."""
        return self._micro_steps

    @micro_steps.setter
    def micro_steps(self, number: int) -> None:
        self._micro_steps = number
        self._step_began = number - number % self.num_steps

    @property
    def _since_step(self) -> int:
        return self._micro_steps - self._step_began

    def is_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return self._since_step + 1 >= self.num_steps

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the current and the following micro-batches are the last of a step; None: count again."""
        self._boundary = is_boundary

    @property
    def syncs(self) -> bool:
        return self._syncs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before
