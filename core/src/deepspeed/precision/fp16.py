"""fp16 with fp32 master weights and loss scaling."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepspeed.precision.loss_scaler import LossScaler
from deepspeed.precision.policy import Precision


class FP16(Precision):
    """Parameters and computation in float16; a step with inf or nan gradients is skipped.

    Args:
        loss_scaler: static or dynamic.
        auto_cast: cast floating inputs of the forward to float16.
    """

    name = "fp16"
    model_dtype = torch.float16

    def __init__(self, loss_scaler: LossScaler, *, clip_norm: float = 0.0, auto_cast: bool = False) -> None:
        super().__init__(clip_norm=clip_norm, checks_overflow=True)
        self.loss_scaler = loss_scaler
        self._auto_cast = auto_cast

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(_to_half, (args, kwargs)) if self._auto_cast else (args, kwargs)


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value
