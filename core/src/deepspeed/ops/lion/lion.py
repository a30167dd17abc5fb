"""Lion: `FusedLion`, `DeepSpeedCPULion`, and their base class with the torch reference."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed._absent import absent_members
from deepspeed.ops.optimizer import (
    KernelOptimizer,
    check_not_sparse,
    check_options,
    host_numbers,
    new_step_count,
    state_dtype,
)


class LionBase(KernelOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2) steps along the sign of an interpolated momentum.

        p <- p * (1 - lr * wd)
        p <- p - lr * sign(b1 * m + (1 - b1) * g)
        m <- b2 * m + (1 - b2) * g

    State: `exp_avg` (m) and `step` (a count that the formulas do not use). It is created at the first gradient.
    The kernel is `lion_step_(params, grads, exp_avgs, steps, copies, *, lr, beta1, beta2, weight_decay, grad_scale)`.
    """

    operator: ClassVar[str] = "lion_step_"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        **options: Any,
    ) -> None:
        check_options(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, **options})

    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        beta1, beta2 = group["betas"]
        return host_numbers(lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])

    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": new_step_count(), "exp_avg": torch.zeros_like(param, dtype=state_dtype(param, group))}

    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            check_not_sparse(grad, "Lion")
            self._update_one(param, grad, group)

    def _update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["step"] += 1
        momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
        grad = grad.to(momentum.dtype)
        direction = torch.lerp(momentum, grad, 1 - beta1).sign_()
        work = param.to(momentum.dtype)  # the parameter itself if the dtypes are equal
        work.mul_(1 - group["lr"] * group["weight_decay"])
        work.sub_(direction.mul_(group["lr"]))
        momentum.lerp_(grad, 1 - beta2)
        if work is not param:
            param.copy_(work)


@absent_members("ops.lion.fused_lion:FusedLion")
class FusedLion(LionBase):
    """Lion with the accelerator's kernel "fused_lion" if it has one, else in torch. Formula: `LionBase`.

    The optimizer factory creates it for "Lion"; users may create it too. With `set_grad_none`, `zero_grad()` sets
    gradients to None rather than to zero. Raises ConfigError for a value out of range.
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


@absent_members("ops.lion.cpu_lion:DeepSpeedCPULion")
class DeepSpeedCPULion(LionBase):
    """Lion on tensors in host memory, with the host extension's kernel "cpu_lion" if available. Formula: `LionBase`.

    The optimizer factory creates it if the optimizer state is offloaded. Users and Accelerate create it too. With
    `fp32_optimizer_states`, half-precision parameters have m in fp32, and the arithmetic is fp32.
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
