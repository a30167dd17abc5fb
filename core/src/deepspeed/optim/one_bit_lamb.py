"""`OnebitLamb`: LAMB that averages the momentum in one bit per element; see `one_bit.py` for the two phases."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError
from deepspeed.ops.optimizer import check_options
from deepspeed.optim.one_bit import (
    TwoPhaseOptimizer,
    adam_roots,
    checked_count,
    dense_gradients,
    mask_momentum,
    roots_of,
    update_variances,
)


@absent_members("runtime.fp16.onebit.lamb:OnebitLamb")
class OnebitLamb(TwoPhaseOptimizer):
    """1-bit LAMB (C. Li et al., arXiv 2104.06069, algorithm 1).

    LAMB's trust ratio needs a current second moment, but the second phase has a frozen one. So the second phase uses a
    mean ratio of the first phase, scaled by the change of the second moment, which the averaged momentum approximates.
    Update t, with T = `freeze_step`, A(x) the one-bit average over ranks, c1 and c2 as in `OnebitAdam`:

        t <= T    m, v as in Adam, from averaged gradients;  f <- v
                  u = (m / c1) / (sqrt(v / c2) + eps) + wd * p
                  c = clamp(|p| / |u|, min_coeff, max_coeff)           1 if |p| or |u| is 0
                  k <- coeff_beta * k + (1 - coeff_beta) * c           0 at first
                  p <- p - lr * c * u
        t > T     m' = A(b1 * m + (1 - b1) * g)                        g is the local gradient; v and k are frozen
                  f <- b2 * f + (1 - b2) * ((m' - b1 * m) / (1 - b1))^2;   m <- m'
                  r' = max over elements of (sqrt(v / c2) + eps) / (sqrt(f / (1 - b2^t)) + eps)
                  r <- clamp r' to factor_min, factor_max, then to r * (1 -+ factor_threshold)     1 at first
                  p <- p - lr * r * k * u

    The one-bit average has one scale per parameter, so momenta need no common scale. The state has the entries of
    `OnebitAdam`, and `exp_avg_sq_fresh` (f, in the second phase), `lamb_coeff_freeze` (k), `last_factor` (r).

    Args:
        params, deepspeed, freeze_step, bias_correction, eps_inside_sqrt: see `OnebitAdam`, also for `exp_avg_mask`
            of a group.
        max_coeff, min_coeff: bounds of the trust ratio.
        coeff_beta: decay of the mean trust ratio.
        factor_max, factor_min: bounds of r.
        factor_threshold: maximum relative change of r from one update to the next.

    Raises ConfigError for a value out of range, for `amsgrad=True` and for `max_grad_norm`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        deepspeed: Any = None,
        lr: float | Tensor = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        check_options(max_coeff=max_coeff, min_coeff=min_coeff)
        _check_range("min_coeff", min_coeff, 0.0, "max_coeff", max_coeff)
        _check_range("factor_min", factor_min, 0.0, "factor_max", factor_max)
        _check_range("coeff_beta", coeff_beta, 0.0, "the number", 1.0)
        _check_range("factor_threshold", factor_threshold, 0.0, "the number", 1.0)
        self.freeze_step = checked_count("freeze_step", freeze_step)
        self.coeff_beta, self.factor_threshold = coeff_beta, factor_threshold
        self.factor_max, self.factor_min = factor_max, factor_min
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            eps_inside_sqrt=eps_inside_sqrt,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            amsgrad=amsgrad,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )
        self._coeffs: dict[Tensor, Tensor] = {}  # parameter -> factor of its last update, without lr

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratio of the last update (r * k in the second phase) of each updated parameter, in the order
        of the groups."""
        params = [param for group in self.param_groups for param in group["params"]]
        return [float(self._coeffs[param]) for param in params if param in self._coeffs]

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        params = self.trained(params, group)
        if not params:
            return
        states = self.moments_of(params)
        grads = dense_gradients(params, type(self).__name__)
        beta1, beta2 = group["betas"]
        firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        before = torch._foreach_mul(firsts, beta1) if self.keeps_gradients else []
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        if self.keeps_gradients:
            self.average(params, firsts)
            mask_momentum(firsts, seconds, group)
            mask_momentum(list(before), seconds, group)  # so that the mask does not count as a gradient
            self._update_fresh(states, list(before), group)
        else:
            update_variances(states, grads, beta2)
        for param, state, root in zip(params, states, roots_of(states, group), strict=True):
            first = state["exp_avg"]
            update = first / root
            if group["bias_correction"]:
                update.div_(1 - beta1 ** int(state["step"]))
            update.add_(param, alpha=group["weight_decay"])
            coeff = self._coeff(param, state, update, root, group)
            self._coeffs[param] = coeff
            param.sub_(update.mul_(coeff * float(group["lr"])))

    @staticmethod
    def _update_fresh(states: list[dict[str, Any]], before: list[Tensor], group: dict[str, Any]) -> None:
        """Update f with the gradients that follow from the averaged momenta; `before` is b1 * m."""
        beta1, beta2 = group["betas"]
        for state, kept in zip(states, before, strict=True):
            if "exp_avg_sq_fresh" not in state:
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
            grad = torch.sub(state["exp_avg"], kept, out=kept).div_(1 - beta1)
            state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _coeff(
        self, param: Tensor, state: dict[str, Any], update: Tensor, root: Tensor, group: dict[str, Any]
    ) -> Tensor:
        """Return the factor of an update without the learning rate, 0-D, computed on the device."""
        if "lamb_coeff_freeze" not in state:
            of_now = self.keeps_gradients  # another optimizer trained the first phase
            first = _trust_ratio(param, update, group) if of_now else 0.0
            state["lamb_coeff_freeze"], state["last_factor"] = param.new_zeros(()) + first, param.new_ones(())
        if not self.keeps_gradients:
            coeff = _trust_ratio(param, update, group)
            state["lamb_coeff_freeze"].lerp_(coeff.to(param.dtype), 1 - self.coeff_beta)
            return coeff
        (fresh,) = adam_roots([state["exp_avg_sq_fresh"]], [int(state["step"])], group)
        last, share = state["last_factor"], self.factor_threshold
        factor = (root / fresh).amax().clamp(self.factor_min, self.factor_max)
        factor = factor.clamp(last * (1 - share), last * (1 + share))
        state["last_factor"].copy_(factor)
        return factor * state["lamb_coeff_freeze"]


def _trust_ratio(param: Tensor, update: Tensor, group: dict[str, Any]) -> Tensor:
    param_norm, update_norm = (torch.linalg.vector_norm(each.float()) for each in (param, update))
    ratio = (param_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((param_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


def _check_range(name: str, value: Any, low: float, bound: str, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name}: found {value!r}, but it must be in [{low:g}, {bound} {high!r}]")
