"""What both Adam fronts share."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.adam.adam_step import adam_step, create_state
from deepspeed.ops.kernel_optimizer import KernelOptimizer, host_numbers
from deepspeed.ops.reference_optimizer import check_options, state_dtype


class AdamBase(KernelOptimizer):
    """Adam whose state dictionary can be exchanged with `torch.optim.Adam` and `torch.optim.AdamW`.

    The kernel is `adam_step_(params, grads, exp_avgs, exp_avg_sqs, steps, copies, *, lr, beta1, beta2, eps,
    weight_decay, adam_w_mode, bias_correction, maximize, grad_scale)`, of an accelerator's extension or the host's.
    `amsgrad`, `capturable` and a learning rate on a device are left to torch.
    """

    operator: ClassVar[str] = "adam_step_"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **options: Any,
    ) -> None:
        check_options(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
        # torch's own keys first, so that a saved group means the same there
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            **options,
        }
        super().__init__(params, defaults)

    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        if group["differentiable"]:
            raise ConfigError("differentiable: found True, which is not supported here; use torch.optim.Adam for it")
        # fused=False and foreach=True or False are the user's word for one of torch's own loops
        wants_torch = group["foreach"] is not None or group["fused"] is False
        if wants_torch or group["amsgrad"] or group["capturable"]:
            return None
        beta1, beta2 = group["betas"]
        numbers = host_numbers(
            lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"]
        )
        if numbers is None:
            return None
        modes = {name: bool(group[name]) for name in ("adam_w_mode", "bias_correction", "maximize")}
        return {**numbers, **modes}

    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return create_state(param, amsgrad=group["amsgrad"], state_dtype=state_dtype(param, group))

    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        adam_step(params, [self.state[param] for param in params], group, grads)
