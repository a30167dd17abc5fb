"""What is known of the steps so far, and of one step; `training.py` makes them."""

from dataclasses import dataclass


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
