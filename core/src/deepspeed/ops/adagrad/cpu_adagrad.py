"""DeepSpeedCPUAdagrad: Adagrad for optimizer state in host memory, with DeepSpeed's arguments."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from deepspeed.errors import ConfigError
from deepspeed.ops.reference_optimizer import ReferenceOptimizer, check_not_negative, new_step_count, state_dtype


class DeepSpeedCPUAdagrad(ReferenceOptimizer):
    """Adagrad (Duchi et al., JMLR 2011), bit-equal to `torch.optim.Adagrad`, state names and all.

        g <- g + wd * p;    s <- s + g^2;    p <- p - lr * g / (sqrt(s) + eps)

    Made by the factory for "Adagrad", by users, and by Accelerate. Unlike torch's class it makes its state at a
    parameter's first gradient, so that an engine may replace the tensors of a group after construction. Sparse
    gradients work with `weight_decay=0`. This is the torch reference; an extension's kernel comes under the same name.

    Args:
        model_params: parameters, or param groups (other keys in a group are kept).
        fp32_optimizer_states: for half parameters, keep s in fp32 and compute in fp32.

    Raises ConfigError for a value out of range and for `amsgrad=True`, which Adagrad has not.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if amsgrad:
            raise ConfigError("amsgrad: found True, but Adagrad has no AMSGrad; leave it out")
        defaults = {
            "lr": lr,
            "lr_decay": 0.0,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": False,
            "fp32_optimizer_states": fp32_optimizer_states,
        }
        super().__init__(model_params, defaults)

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        grad = param.grad
        assert grad is not None
        state = self.state[param]
        if not state:
            state["step"] = new_step_count()
            state["sum"] = torch.zeros_like(param, dtype=state_dtype(param, group))
        work = param.to(state["sum"].dtype)  # the parameter itself when the dtypes agree
        adagrad(
            [work],
            [grad.to(work.dtype)],
            [state["sum"]],
            [state["step"]],
            has_sparse_grad=grad.is_sparse,
            foreach=False,
            has_complex=work.is_complex(),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        if work is not param:
            param.copy_(work)
