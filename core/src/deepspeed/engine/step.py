"""The optimizer step at a gradient accumulation boundary, from top to bottom."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from deepspeed.precision import Precision
from deepspeed.zero.strategy import Sharding


@dataclass(slots=True)
class Progress:
    """The engine's counters."""

    global_steps: int = 0  # optimizer steps, skipped ones included
    global_samples: int = 0  # over all ranks
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What observers learn of one step."""

    global_step: int  # steps taken before this one
    applied: bool  # False: the gradients overflowed and the step was skipped
    grad_norm: float  # global L2 norm, unscaled, before clipping
    loss_scale: float  # the scale that this step's losses had


def take_step(
    sharding: Sharding,
    precision: Precision,
    advance_schedule: Callable[[], None],
    global_step: int,
    phase: Callable[[str], AbstractContextManager[None]],
) -> StepStats:
    """Judge the reduced gradients, update, forget.

    Args:
        advance_schedule: steps the learning rate schedule; called only if the step was applied.
        phase: measures its body under a name.
    """
    loss_scale = precision.loss_scaler.loss_scale
    with phase("step"):
        verdict = precision.verdict(sharding.norm())
        if verdict.applies:
            sharding.update(verdict.grad_scale)
            advance_schedule()
        sharding.zero_grad()
        precision.after_step(verdict)
    return StepStats(global_step, verdict.applies, verdict.norm, loss_scale)
