"""DeepSpeedCPULion: Lion for optimizer state in host memory, with DeepSpeed's arguments."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from deepspeed._absent_members import absent_members
from deepspeed.ops.lion.lion_base import LionBase


@absent_members("ops.lion.cpu_lion:DeepSpeedCPULion")
class DeepSpeedCPULion(LionBase):
    """Lion over tensors in host memory, by the host extension's kernel "cpu_lion" where it can be had.

    Made by the factory when optimizer state is offloaded, by users, and by Accelerate. `fp32_optimizer_states`: for
    half parameters, keep m in fp32 and compute in fp32. Formula: `LionBase`.
    Raises ConfigError for a value out of range.
    """

    kernel_op: ClassVar[str | None] = "cpu_lion"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            fp32_optimizer_states=fp32_optimizer_states,
        )
