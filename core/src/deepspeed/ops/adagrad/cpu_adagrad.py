"""DeepSpeedCPUAdagrad: Adagrad for optimizer state in host memory, with DeepSpeed's arguments."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError
from deepspeed.ops.optimizer import KernelOptimizer, check_options, host_numbers, new_step_count, state_dtype


@absent_members("ops.adagrad.cpu_adagrad:DeepSpeedCPUAdagrad")
class DeepSpeedCPUAdagrad(KernelOptimizer):
    """Adagrad (Duchi et al., JMLR 2011) with the formula and the state names of `torch.optim.Adagrad`.

        g <- g + wd * p;    s <- s + g^2;    p <- p - lr * g / (sqrt(s) + eps)

    The optimizer factory creates it for "Adagrad". Users and Accelerate create it too. Unlike torch's class, it creates
    a parameter's state at its first gradient, so an engine may replace the tensors of a group after construction. torch
    handles sparse gradients, which require `weight_decay=0`. The host extension's kernel, if available, handles dense
    gradients: `adagrad_step_(params, grads, sums, steps, copies, *, lr, lr_decay, eps, weight_decay, maximize,
    grad_scale)`. The torch reference is bit-equal to torch's class.

    Args:
        model_params: parameters, or param groups (other keys in a group are kept).
        fp32_optimizer_states: for half-precision parameters, keep s in fp32 and compute in fp32.

    Raises ConfigError for a value out of range and for `amsgrad=True`, which Adagrad does not support.
    """

    kernel_op: ClassVar[str | None] = "cpu_adagrad"
    operator: ClassVar[str] = "adagrad_step_"
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_options(lr=lr, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
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

    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        numbers = host_numbers(**{name: group[name] for name in ("lr", "lr_decay", "eps", "weight_decay")})
        return None if numbers is None else {**numbers, "maximize": bool(group["maximize"])}

    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": new_step_count(), "sum": torch.zeros_like(param, dtype=state_dtype(param, group))}

    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            self._update_one(param, grad, group)

    def _update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        work = param.to(state["sum"].dtype)  # the parameter itself if the dtypes are equal
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
