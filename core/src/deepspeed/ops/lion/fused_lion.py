"""FusedLion: Lion for parameters on the accelerator, with DeepSpeed's arguments."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
from deepspeed.ops.lion.lion_base import LionBase


@absent_members("ops.lion.fused_lion:FusedLion")
class FusedLion(LionBase):
    """Lion, by the accelerator's kernel "fused_lion" where it has one, else in torch. Formula: `LionBase`.

    Made by the factory for "Lion", or by users. `set_grad_none`: `zero_grad()` sets gradients to None rather than zero.
    Raises ConfigError for a value out of range.
    """

    kernel_op: ClassVar[str | None] = "fused_lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, set_grad_none=set_grad_none)


complete(__name__)
