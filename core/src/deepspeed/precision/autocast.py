"""torch autocast: parameters stay fp32, torch chooses the dtype operator by operator."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from deepspeed.config.precision import TorchAutocastConfig
from deepspeed.precision.loss_scaler import LossScaler
from deepspeed.precision.policy import Precision


class Autocast(Precision):
    """The forward runs under `torch.autocast`.

    Args:
        device_type: of the accelerator, as `torch.autocast` takes it.
        dtype: torch.bfloat16 or torch.float16; the latter wants a dynamic `loss_scaler`.
    """

    name = "autocast"

    def __init__(
        self, device_type: str, dtype: torch.dtype, *, clip_norm: float = 0.0, loss_scaler: LossScaler | None = None
    ) -> None:
        super().__init__(clip_norm=clip_norm, checks_overflow=loss_scaler is not None)
        self.device_type, self.dtype = device_type, dtype
        if loss_scaler is not None:
            self.loss_scaler = loss_scaler

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)


class _HasPrecision(Protocol):
    precision: Precision


def autocast_if_enabled(engine: _HasPrecision) -> AbstractContextManager[Any]:
    """The context that the engine's forward has: `torch.autocast` with `torch_autocast.enabled`, else nothing.

    For a part of the computation outside of the engine, such as a loss.
    """
    return engine.precision.forward_context()


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The default of `torch_autocast.lower_precision_safe_modules`."""
    return list(TorchAutocastConfig().lower_precision_safe_modules)
