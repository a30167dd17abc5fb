"""`Precision`: what the engine asks about number formats. The base class *is* fp32; others override what differs.

Call order in one step:

    1. cast_inputs(args, kwargs), forward_context()      around the module's forward
    2. scale(loss)                                       before its backward
    3. verdict(norm)                                     after the gradients are reduced
    4. after_step(verdict)                               the loss scale learns from it
"""

import contextlib
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.log import warn_once
from deepspeed.precision.loss_scaler import LossScaler


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the step is made, and by what its gradients are multiplied first."""

    applies: bool
    grad_scale: float | Tensor  # unscales and clips in one factor; a 0-D tensor if it clips by a norm that is one
    norm: float | Tensor  # global L2 norm of the unscaled gradients, before clipping


class Precision:
    """fp32: the parameters stay as they are.

    Args:
        clip_norm: gradients are clipped to this global L2 norm; 0 means never.
        checks_overflow: skip a step whose gradients are not finite.
    """

    name = "fp32"
    #: dtype that the parameters get, or None to leave them
    model_dtype: torch.dtype | None = None

    def __init__(self, *, clip_norm: float = 0.0, checks_overflow: bool = False) -> None:
        self.clip_norm = clip_norm
        self.checks_overflow = checks_overflow
        self.loss_scaler = LossScaler(1.0)

    def cast_params(self, module: torch.nn.Module) -> None:
        """Cast floating parameters that are not yet in the model's dtype: frozen ones."""
        if self.model_dtype is not None:
            cast_floating(module.parameters(), self.model_dtype)

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of the module's forward; as given, but for fp16 with `auto_cast`."""
        return args, kwargs

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context for the module's forward."""
        return contextlib.nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as its backward needs it."""
        return self.loss_scaler.scale(loss)

    def verdict(self, scaled_norm: float | Tensor) -> Verdict:
        """Judge the reduced gradients by their norm: g <- g / loss_scale * min(1, clip_norm / (norm + 1e-6)).

        The clip coefficient is that of `torch.nn.utils.clip_grad_norm_`, also where the step is made with a norm that
        is not finite: nan makes every gradient nan; inf makes the finite ones 0 and the infinite ones nan.

        Args:
            scaled_norm: of the gradients as they are; as a 0-D tensor it is read only if it decides whether the step
                is made.
        """
        if isinstance(scaled_norm, Tensor):
            if not self.checks_overflow:
                return self._verdict_on_device(scaled_norm)
            scaled_norm = scaled_norm.item()
        loss_scale = self.loss_scaler.loss_scale
        norm = scaled_norm / loss_scale
        applies = not self.checks_overflow or math.isfinite(scaled_norm)
        if applies:
            warn_unless_finite(norm)
        factor = 1.0 / loss_scale
        if applies and self.clip_norm > 0:
            coefficient = self.clip_norm / (norm + 1e-6)
            factor *= coefficient if math.isnan(coefficient) else min(1.0, coefficient)
        return Verdict(applies, factor, norm)

    def _verdict_on_device(self, scaled_norm: Tensor) -> Verdict:
        """The step is made; its factor stays on the device."""
        norm = scaled_norm / self.loss_scaler.loss_scale
        factor: float | Tensor = 1.0 / self.loss_scaler.loss_scale
        if self.clip_norm > 0:
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0) * factor
        return Verdict(True, factor, norm)

    def after_step(self, verdict: Verdict) -> None:
        """Let the loss scale adapt."""
        self.loss_scaler.update(overflow=not verdict.applies)


def cast_floating(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Give every floating tensor this dtype; each stays the same object."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def warn_unless_finite(norm: float) -> None:
    """Warn once of a step that is made with gradients of this norm."""
    if not math.isfinite(norm):
        warn_once(
            f"step: the norm of the gradients is {norm}, and the step is made all the same: the weights are lost. Look "
            'for the cause; in bf16 "bf16": {"check_grad_overflow": true}, the default, skips such steps'
        )
