"""DeepSpeedCPUAdam: Adam for optimizer state in host memory, with DeepSpeed's arguments."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from deepspeed._absent_members import absent_members
from deepspeed.ops.adam.adam_base import AdamBase
from deepspeed.ops.reference_optimizer import check_options


@absent_members("ops.adam.cpu_adam:DeepSpeedCPUAdam")
class DeepSpeedCPUAdam(AdamBase):
    """AdamW (`adamw_mode=True`) or Adam over tensors in host memory.

    Made by the factory when optimizer state is offloaded, by users, and by Accelerate as
    `DeepSpeedCPUAdam(optimizer.param_groups, lr=..., weight_decay=..., adamw_mode=...)`. Runs the
    host extension's kernel "cpu_adam" where it can be had, else torch's own. Formulas: `adam_step`.

    Args:
        model_params: parameters, or param groups (other keys in a group are kept, and win over the arguments here).
        adamw_mode: decoupled weight decay instead of L2.
        fp32_optimizer_states: for half parameters, keep m and v in fp32 and compute in fp32; False keeps them in the
            parameter's dtype.

    Raises ConfigError for a value out of range.
    """

    kernel_op: ClassVar[str | None] = "cpu_adam"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_options(adamw_mode=adamw_mode)
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adamw_mode,
            fp32_optimizer_states=fp32_optimizer_states,
        )
