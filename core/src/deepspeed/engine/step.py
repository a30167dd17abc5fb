"""`Progress` counts the steps so far and `StepStats` describes one step; `training.py` makes both."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Progress:
    """The engine's counters."""

    global_steps: int = 0  # optimizer steps, skipped ones included
    global_samples: int = 0  # over all ranks
    skipped_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """`StepStats` holds what observers learn of one step."""

    global_step: int  # steps taken before this one
    applied: bool  # False: the gradients overflowed and the step was skipped
    norm: float | Tensor  # as `grad_norm`, not yet read where it is a 0-D tensor of the device
    loss_scale: float  # the scale that this step's losses had

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the gradients, unscaled, before clipping. On a device the host waits for it here."""
        return float(self.norm)
