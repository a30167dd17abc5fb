"""FusedLamb: LAMB with DeepSpeed's arguments."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError
from deepspeed.ops.optimizer import (
    KernelOptimizer,
    check_not_sparse,
    check_options,
    host_numbers,
    new_step_count,
)


@absent_members("ops.lamb.fused_lamb:FusedLamb")
class FusedLamb(KernelOptimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2) scales Adam's direction by a trust ratio per parameter.

        m <- b1 * m + (1 - b1) * g                       v <- b2 * v + (1 - b2) * g^2
        u  = m^ / (sqrt(v^) + eps) + wd * p              m^ = m / (1 - b1^t), v^ = v / (1 - b2^t)
        r  = clamp(|p| / |u|, min_coeff, max_coeff)      1 if |p| or |u| is 0; | | is the L2 norm of one parameter
        p <- p - lr * r * u

    The optimizer factory creates it for "Lamb"; users may create it too. The accelerator's kernel, if it has one, is
    `lamb_step_(params, grads, exp_avgs, exp_avg_sqs, steps, copies, coeffs, *, lr, beta1, beta2, eps, weight_decay,
    bias_correction, eps_inside_sqrt, min_coeff, max_coeff, grad_scale)`; it writes the trust ratios to `coeffs`.
    The trust ratio needs full parameters, so LAMB does not work on shards (see `optim.is_elementwise`).

    Args:
        params: parameters, or param groups.
        bias_correction: False uses m and v for m^ and v^.
        eps_inside_sqrt: use sqrt(v^ + eps) instead of sqrt(v^) + eps.
        max_grad_norm: a value > 0 limits the global L2 norm of all gradients of a step. With an engine, use the config
            key `gradient_clipping` instead.
        max_coeff, min_coeff: bounds of the trust ratio.

    Raises ConfigError for a value out of range and for `amsgrad=True`, which LAMB does not support.
    """

    kernel_op: ClassVar[str | None] = "fused_lamb"
    operator: ClassVar[str] = "lamb_step_"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        check_options(amsgrad=amsgrad, bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt)
        check_options(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        check_options(max_grad_norm=max_grad_norm, max_coeff=max_coeff, min_coeff=min_coeff)
        if not 0.0 <= min_coeff <= max_coeff:
            raise ConfigError(f"min_coeff: found {min_coeff!r}, but it must be in [0, max_coeff={max_coeff!r}]")
        if amsgrad:
            raise ConfigError("amsgrad: found True, but LAMB has no AMSGrad; leave it out")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._coeffs: dict[Tensor, Tensor] = {}  # parameter -> its last trust ratio
        self._grad_norm: Tensor | None = None

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last step, one per parameter with a gradient, in the order of the groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        return [float(self._coeffs[param]) for param in params if param in self._coeffs]

    def before_update(self) -> None:
        self._coeffs, self._grad_norm = {}, None
        if any(group["max_grad_norm"] > 0 for group in self.param_groups):
            params = [param for group in self.param_groups for param in group["params"]]
            self._grad_norm = get_total_norm([param.grad for param in params if param.grad is not None])

    def has_one_pass(self, group: dict[str, Any]) -> bool:
        """Return False with `max_grad_norm`, which needs the norm of all gradients first; else see the base class."""
        return group["max_grad_norm"] == 0 and super().has_one_pass(group)

    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        beta1, beta2 = group["betas"]
        names = ("lr", "eps", "weight_decay", "min_coeff", "max_coeff")
        numbers = host_numbers(beta1=beta1, beta2=beta2, **{name: group[name] for name in names})
        if numbers is None:
            return None
        return {**numbers, **{name: bool(group[name]) for name in ("bias_correction", "eps_inside_sqrt")}}

    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": new_step_count(),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }

    def run_kernel(self, operator: Callable[..., Any], lists: list[Any], numbers: dict[str, Any]) -> None:
        params = lists[0]
        coeffs = torch.empty(len(params), dtype=torch.float32, device=params[0].device)
        super().run_kernel(operator, [*lists, coeffs], numbers)
        self._coeffs.update(zip(params, coeffs.unbind(), strict=True))

    def gradients(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        grads = super().gradients(params, group)
        if self._grad_norm is None or group["max_grad_norm"] == 0:
            return grads
        shrink = (self._grad_norm / group["max_grad_norm"]).clamp(min=1.0)
        return [grad / shrink.to(grad.device) for grad in grads]

    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        for param, grad in zip(params, grads, strict=True):
            check_not_sparse(grad, "LAMB")
            self._coeffs[param] = self._update_one(param, grad, group)

    def _update_one(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        state["step"] += 1
        direction = self._adam_direction(state, grad, group)
        direction.add_(param, alpha=group["weight_decay"])
        ratio = self._trust_ratio(param, direction, group)
        param.sub_(direction.mul_(ratio * group["lr"]))
        return ratio

    @staticmethod
    def _adam_direction(state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        (beta1, beta2), t, eps = group["betas"], float(state["step"]), group["eps"]
        first = state["exp_avg"].lerp_(grad, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["bias_correction"]:
            first, second = first / (1 - beta1**t), second / (1 - beta2**t)
        denominator = (second + eps).sqrt() if group["eps_inside_sqrt"] else second.sqrt() + eps
        return first / denominator

    @staticmethod
    def _trust_ratio(param: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        # fp32 norms even for half-precision weights; no branch on the host, so no device synchronization
        param_norm = torch.linalg.vector_norm(param.float())
        direction_norm = torch.linalg.vector_norm(direction.float())
        ratio = (param_norm / direction_norm).clamp(group["min_coeff"], group["max_coeff"])
        usable = (param_norm > 0) & (direction_norm > 0)
        return torch.where(usable, ratio, torch.ones_like(ratio))
