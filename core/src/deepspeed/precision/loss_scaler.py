"""Loss scales: a constant one, and one that follows overflows.

Small fp16 gradients vanish below 6e-8, so the loss is multiplied by a scale before the backward and the gradients
are divided by it before the step (Mixed Precision Training, arXiv 1710.03740, section 3.2).
"""

import math
from typing import Any

from torch import Tensor

from deepspeed._absent_members import absent_members
from deepspeed.errors import CheckpointError, StateError
from deepspeed.log import report


@absent_members("runtime.fp16.loss_scaler:LossScaler")
class LossScaler:
    """A constant loss scale."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"  # its old address, by which DeepSpeed's checkpoints name it
    is_dynamic = False

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = float(loss_scale)
        self.overflow = False  # whether the last step was skipped

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale == 1.0 else loss.float() * self.loss_scale

    def update(self, *, overflow: bool) -> None:
        """Called once per step, after it was judged."""
        self.overflow = overflow
        if overflow:
            scale = "" if self.loss_scale == 1.0 else f", at the constant loss scale {self.loss_scale:g}"
            report(f"gradient overflow: step skipped{scale}")

    def state_dict(self) -> dict[str, Any]:
        return {"cur_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A constant scale is the configuration's, whatever a checkpoint had."""

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError for what `load_state_dict` cannot take; changes nothing."""


@absent_members("runtime.fp16.loss_scaler:DynamicLossScaler")
class DynamicLossScaler(LossScaler):
    """Halves the scale on overflow, doubles it after `window` steps without one.

    An overflow is forgiven `hysteresis - 1` times before the scale is lowered. The credit is restored when the scale
    is raised, or with `consecutive_hysteresis` after every good step.

    Args:
        initial_scale: first scale, usually 2**16.
        window: steps between raises.
        hysteresis: overflows until the scale is lowered.
        min_scale: the scale is not lowered further; an overflow at it raises StateError, since nothing would ever
            be learned again.
    """

    is_dynamic = True
    factor = 2.0

    def __init__(
        self,
        initial_scale: float,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(initial_scale)
        self.window, self.hysteresis, self.min_scale = window, hysteresis, float(min_scale)
        self.consecutive_hysteresis = consecutive_hysteresis
        self._credit = hysteresis
        self._num_steps = 0
        self._last_overflow = -1

    def update(self, *, overflow: bool) -> None:
        self.overflow = overflow
        if overflow:
            self._lower()
            self._last_overflow = self._num_steps
        else:
            if self.consecutive_hysteresis:
                self._credit = self.hysteresis
            if (self._num_steps - self._last_overflow) % self.window == 0:
                self._credit = self.hysteresis
                self.loss_scale *= self.factor
        self._num_steps += 1

    def _lower(self) -> None:
        if self._credit > 1:
            self._credit -= 1
            report(f"gradient overflow: step skipped, loss scale {self.loss_scale:g} kept (hysteresis)")
            return
        if self.loss_scale <= self.min_scale:
            raise StateError(
                f"gradient overflow at the smallest loss scale ({self.loss_scale:g}, fp16.min_loss_scale): training "
                "has diverged; lower the learning rate or use bf16"
            )
        lowered = max(self.loss_scale / self.factor, self.min_scale)
        report(f"gradient overflow: step skipped, loss scale {self.loss_scale:g} -> {lowered:g}")
        self.loss_scale = lowered

    def state_dict(self) -> dict[str, Any]:
        return {
            "cur_scale": self.loss_scale,
            "cur_hysteresis": self._credit,
            "cur_iter": self._num_steps,
            "last_overflow_iter": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another dynamic scale was; the state of a constant one leaves this one as it is."""
        self.check_state_dict(state)
        if "cur_hysteresis" not in state:
            return
        self.loss_scale = float(state["cur_scale"])
        self._credit = int(state["cur_hysteresis"])
        self._num_steps = int(state["cur_iter"])
        self._last_overflow = int(state["last_overflow_iter"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if "cur_hysteresis" not in state:
            return
        for name, own in self.state_dict().items():
            value: Any = state.get(name)
            fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if fits:
                fits = value > 0 if name == "cur_scale" else value == int(value)
            if not fits:
                raise CheckpointError(
                    f"loss scale: the saved {name} is {value!r:.60}, and a number as {own} is expected; load another "
                    "tag, or with load_optimizer_states=False"
                )
