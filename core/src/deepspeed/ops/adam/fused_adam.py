"""FusedAdam: Adam for parameters on the accelerator, with DeepSpeed's arguments."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
from deepspeed.errors import ConfigError
from deepspeed.ops.adam.adam_base import AdamBase
from deepspeed.ops.reference_optimizer import check_options


@absent_members("ops.adam.fused_adam:FusedAdam")
class FusedAdam(AdamBase):
    """Adam (`adam_w_mode=False`) or AdamW (the default), by the accelerator's kernel or torch's own fused one.

    Made by the optimizer factory for "Adam" and "AdamW", or by users. The kernel is the accelerator's op "fused_adam"
    where it can be had. Formulas: `adam_step`.

    Args:
        params: parameters, or param groups (other keys in a group are kept).
        bias_correction: divide m and v by 1 - beta^t.
        adam_w_mode: decoupled weight decay instead of L2.
        set_grad_none: `zero_grad()` sets gradients to None rather than to zero.

    Raises ConfigError for a value out of range, and for `amsgrad=True`, which DeepSpeed's FusedAdam has not.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = FusedAdam([weight], lr=0.5)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.5000, -1.5000])
    """

    kernel_op: ClassVar[str | None] = "fused_adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_options(amsgrad=amsgrad)
        if amsgrad:
            raise ConfigError(
                "amsgrad: found True, but FusedAdam has no AMSGrad; use DeepSpeedCPUAdam or torch.optim.AdamW"
            )
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adam_w_mode=adam_w_mode,
            set_grad_none=set_grad_none,
        )


complete(__name__)
