"""Lion: what both fronts share, and the torch reference."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.kernel_optimizer import KernelOptimizer, host_numbers
from deepspeed.ops.reference_optimizer import (
    check_not_sparse,
    check_options,
    new_step_count,
    state_dtype,
)


class LionBase(KernelOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, one state per weight.

        p <- p * (1 - lr * wd)
        p <- p - lr * sign(b1 * m + (1 - b1) * g)
        m <- b2 * m + (1 - b2) * g

    State: `exp_avg` (m) and `step` (a count; the formulas do not use it). Made at the first gradient.
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
        work = param.to(momentum.dtype)  # the parameter itself when the dtypes agree
        work.mul_(1 - group["lr"] * group["weight_decay"])
        work.sub_(direction.mul_(group["lr"]))
        momentum.lerp_(grad, 1 - beta2)
        if work is not param:
            param.copy_(work)
