"""Lion in torch: what both fronts share."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.reference_optimizer import (
    ReferenceOptimizer,
    check_betas,
    check_not_negative,
    check_not_sparse,
    new_step_count,
    state_dtype,
)


class LionBase(ReferenceOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, one state per weight.

        p <- p * (1 - lr * wd)
        p <- p - lr * sign(b1 * m + (1 - b1) * g)
        m <- b2 * m + (1 - b2) * g

    State: `exp_avg` (m) and `step` (a count; the formulas do not use it). Made at the first gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        **options: Any,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, **options})

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        check_not_sparse(param.grad, "Lion")
        state = self.state[param]
        if not state:
            state["step"] = new_step_count()
            state["exp_avg"] = torch.zeros_like(param, dtype=state_dtype(param, group))
        state["step"] += 1
        momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
        grad = param.grad.to(momentum.dtype)
        direction = torch.lerp(momentum, grad, 1 - beta1).sign_()
        work = param.to(momentum.dtype)  # the parameter itself when the dtypes agree
        work.mul_(1 - group["lr"] * group["weight_decay"])
        work.sub_(direction.mul_(group["lr"]))
        momentum.lerp_(grad, 1 - beta2)
        if work is not param:
            param.copy_(work)
