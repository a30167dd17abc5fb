"""Optimizers that communicate one bit per element: their base class `OneBitOptimizer`, and 1-bit Adam (`OnebitAdam`).

Adam's second moment hardly changes after a while. With a constant second moment the update is linear, so ranks may
average the momentum instead of the gradients. Error feedback compensates for the rounding of the momentum to signs
(`deepspeed.comm.compressed`). Training has two phases:

    1. `freeze_step` Adam updates with averaged gradients
    2. the second moment is frozen; each rank adds its local gradient to the momentum, and ranks average the momentum

The engine (`deepspeed.zero.stages`) calls `join` to set the ranks, and `begin_phase` before each backward, which sets
the kind of gradients that the step needs. Without an engine, an optimizer has one rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed._absent import absent_members
from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.compressed import RoundingErrors, average
from deepspeed.errors import ConfigError, counted
from deepspeed.log import warn_once
from deepspeed.ops.optimizer import ReferenceOptimizer, check_not_sparse, check_options, new_step_count


class OneBitOptimizer(ReferenceOptimizer):
    """The base class of optimizers whose step communicates more than gradients.

    A subclass implements `begin_phase`, and calls `average` for one-bit communication.
    """

    #: the one-bit average has one scale per parameter
    is_elementwise = False
    #: whether the next update needs local gradients instead of the average over ranks
    keeps_gradients = False
    #: the ranks that train together; None: this process alone
    ranks: GroupBackend | None = None
    #: options of groups that loading a checkpoint does not change
    kept_options = frozenset({"exp_avg_mask", "bias_correction"})
    #: attributes that determine the communication and must be equal on all ranks
    phase_options: tuple[str, ...] = ()

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        eps_inside_sqrt: bool,
        weight_decay: float,
        max_grad_norm: float,
        amsgrad: bool,
        **others: float,
    ) -> None:
        check_options(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        check_options(bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt, amsgrad=amsgrad)
        refuse_not_here(type(self).__name__, amsgrad=amsgrad, max_grad_norm=max_grad_norm)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            **others,
        }
        super().__init__(params, defaults)
        #: parameter -> its rounding errors
        self.rounding: dict[Tensor, RoundingErrors] = {}

    def join(self, ranks: GroupBackend) -> None:
        """Train together with other ranks from now on. An engine calls this on all ranks."""
        self.ranks = ranks
        self.rounding = {}

    @property
    def phase_settings(self) -> dict[str, int]:
        """The values of `phase_options` by name. An engine compares them across ranks."""
        return {name: getattr(self, name) for name in self.phase_options}

    @property
    def is_frozen(self) -> bool:
        """Whether the second moments are frozen in the current update and all later ones."""
        raise NotImplementedError(f"{type(self).__name__} must write is_frozen")

    def past_variances(self, step: int) -> int:
        """Return the number of updates of a parameter's second moment in its first `step` updates, computed from the
        settings. Used for states of other optimizers, which do not store this count."""
        raise NotImplementedError(f"{type(self).__name__} must write past_variances")

    def begin_phase(self) -> None:
        """Set `keeps_gradients`, equally on all ranks. Called when a backward begins."""
        raise NotImplementedError(f"{type(self).__name__} must write begin_phase")

    def before_update(self) -> None:
        if self.ranks is None:  # no engine calls `begin_phase`
            self.begin_phase()

    def finish_update(self) -> list[Tensor]:
        """Complete pending averages after all parameters with a gradient were updated, and return the parameters that
        this changes. An engine calls this on all ranks."""
        return []

    def restore_rounding(self, saved: Mapping[Tensor, Sequence[Tensor] | None]) -> None:
        """Restore the rounding errors: parameter -> (worker error, server error) of this rank. Called after weights or
        states are loaded."""
        self.rounding = {}
        world_size = 1 if self.ranks is None else self.ranks.world_size
        for param, errors in saved.items():
            if errors is not None:
                own = self.rounding[param] = RoundingErrors.zero(param, world_size)
                own.worker.copy_(errors[0])
                own.server.copy_(errors[1])
        self.begin_phase()
        for state in filter(None, self.state.values()):
            self._count_variances(state)
        trained = [param for param in saved if self.state.get(param)]
        lacking = sum(param not in self.rounding for param in trained)
        if world_size > 1 and self.keeps_gradients and lacking:
            warn_once(
                f"{type(self).__name__}: found no rounding errors of {world_size} ranks in what was loaded, for "
                f"{lacking} of {counted(len(trained), 'trained parameter')}; they begin at zero, and the next steps "
                "are less exact. A checkpoint of as many ranks has them"
            )

    @property
    def num_updates(self) -> int:
        """The largest number of updates of any parameter so far."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def trained(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the `params` that can be updated. In the second phase, a parameter whose second moment was never
        updated has no step size, so it is left out with a warning."""
        if not self.is_frozen:
            return params
        known = [param for param in params if self.state.get(param) and self._count_variances(self.state[param])]
        if len(known) < len(params):
            index = next((number for number, each in enumerate(self.param_groups) if each is group), 0)
            shapes = sorted({tuple(param.shape) for param in params} - {tuple(param.shape) for param in known})
            warn_once(
                f"{type(self).__name__}: found {counted(len(params) - len(known), 'parameter')} of "
                f"param_groups[{index}] (shapes: {', '.join(map(str, shapes)) or 'as of others'}) whose first gradient "
                f"came after {self.phase_options[0]} {getattr(self, self.phase_options[0])}, when second moments stay "
                "as they are: without one a parameter cannot be trained, and keeps its values. Train it from before "
                f"then, or raise {self.phase_options[0]}"
            )
        return known

    def _count_variances(self, state: dict[str, Any]) -> int:
        """Return the number of updates of the second moment of a state. Add the count to the state if missing."""
        if "variance_step" not in state:
            state["variance_step"] = new_step_count() + self.past_variances(int(state["step"]))
        return int(state["variance_step"])

    def moments_of(self, params: list[Tensor]) -> list[dict[str, Any]]:
        """Return the states of parameters for an update. Create zero moments if necessary, and increment the step
        counts."""
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                state["step"], state["variance_step"] = new_step_count(), new_step_count()
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            self._count_variances(state)
            state["step"] += 1
        return states

    def average(self, params: list[Tensor], values: list[Tensor]) -> None:
        """Replace `values`, one per parameter, by their average over the ranks, communicated in one bit per element. A
        collective."""
        if self.ranks is None or self.ranks.world_size == 1:
            return
        for param, value in zip(params, values, strict=True):
            if param not in self.rounding:
                self.rounding[param] = RoundingErrors.zero(value, self.ranks.world_size)
        average(self.ranks, values, [self.rounding[param] for param in params], tag="1-bit average")


class TwoPhaseOptimizer(OneBitOptimizer):
    """An optimizer that freezes the second moments after `freeze_step` updates, and then averages momenta."""

    phase_options = ("freeze_step",)
    freeze_step: int

    def begin_phase(self) -> None:
        self.keeps_gradients = self.num_updates >= self.freeze_step

    @property
    def is_frozen(self) -> bool:
        return self.keeps_gradients

    def past_variances(self, step: int) -> int:
        return min(step, self.freeze_step)


@absent_members("runtime.fp16.onebit.adam:OnebitAdam")
class OnebitAdam(TwoPhaseOptimizer):
    """1-bit Adam (H. Tang et al., arXiv 2102.02888, algorithm 1), with Adam's bias correction and AdamW's decay.

    Update t, with gradient g, T = `freeze_step`, and A(x) the one-bit average over ranks:

        t <= T    m <- b1 * m + (1 - b1) * g        g is the average over ranks
                  v <- b2 * v + (1 - b2) * g^2
        t > T     m <- A(b1 * m + (1 - b1) * g)     g is the local gradient; v is frozen
        p <- p * (1 - lr * wd) - lr * (m / c1) / (sqrt(v / c2) + eps)
        c1 = c2 = 1; with bias_correction 1 - b1^n and 1 - b2^k, after n updates of p and k updates of its v

    State of a parameter: `step` (n), `variance_step` (k), `exp_avg` (m), `exp_avg_sq` (v).

    The optimizer factory creates it for "OneBitAdam"; users may create it too. An element without a gradient in the
    first phase has v = 0 and no step size, so its momentum is zero in the second phase. If the first gradient of a
    parameter comes in the second phase, the parameter keeps its values, without decay, and a warning is logged.

    Args:
        params: parameters, or param groups. A group may have `exp_avg_mask`, a tensor of 0 and 1 in the shape of its
            parameters: the momentum is zero where the mask is 0, as for elements that never have a gradient.
        deepspeed: accepted for compatibility, and ignored: an engine calls `join`.
        freeze_step: number of updates of the first phase, at least 1. It should exceed the learning-rate warm-up,
            because v is too small otherwise.
        bias_correction: Adam's. DeepSpeed's signature has True but makes no correction; so the default here is False.
        eps_inside_sqrt: use sqrt(v / c2 + eps) instead of sqrt(v / c2) + eps.
        weight_decay: decoupled weight decay.

    Raises ConfigError for a value out of range, for `amsgrad=True`, which is not supported, and for `max_grad_norm`.
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
        amsgrad: bool = False,
    ) -> None:
        self.freeze_step = checked_count("freeze_step", freeze_step)
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
        )

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        params = self.trained(params, group)
        if not params:
            return
        states = self.moments_of(params)
        beta1, beta2 = group["betas"]
        grads = dense_gradients(params, type(self).__name__)
        firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        if self.keeps_gradients:
            self.average(params, firsts)
            mask_momentum(firsts, seconds, group)
        else:
            update_variances(states, grads, beta2)
        step_by_moments(params, states, group)


def update_variances(states: list[dict[str, Any]], grads: list[Tensor], beta2: float) -> None:
    """Update the second moments with gradients, and increment `variance_step`."""
    seconds = [state["exp_avg_sq"] for state in states]
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, value=1 - beta2)
    for state in states:
        state["variance_step"] += 1


def dense_gradients(params: list[Tensor], name: str) -> list[Tensor]:
    """Return the gradients of `params`. All must have a dense gradient."""
    grads = []
    for param in params:
        assert param.grad is not None
        check_not_sparse(param.grad, name)
        grads.append(param.grad)
    return grads


def mask_momentum(firsts: list[Tensor], seconds: list[Tensor], group: dict[str, Any]) -> None:
    """Zero the momentum of elements that never had a gradient (signs cannot represent 0), and where the group's
    `exp_avg_mask` is 0."""
    mask = group.get("exp_avg_mask")
    for first, second in zip(firsts, seconds, strict=True):
        first.mul_(second != 0)
        if mask is not None:
            first.mul_(mask.to(first))


def step_by_moments(params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """Update `params` by the formula of `OnebitAdam`."""
    (beta1, _), lr, corrects = group["betas"], float(group["lr"]), group["bias_correction"]
    steps = torch._foreach_div([state["exp_avg"] for state in states], roots_of(states, group))
    torch._foreach_mul_(steps, [lr / (1 - beta1 ** int(state["step"])) if corrects else lr for state in states])
    if group["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_sub_(params, steps)


def roots_of(states: list[dict[str, Any]], group: dict[str, Any]) -> list[Tensor]:
    """Return `adam_roots` of states with a `variance_step`."""
    return adam_roots(
        [state["exp_avg_sq"] for state in states], [int(state["variance_step"]) for state in states], group
    )


def adam_roots(seconds: list[Tensor], counts: list[int], group: dict[str, Any]) -> list[Tensor]:
    """Return Adam's denominators sqrt(v / c2) + eps for second moments and their numbers of updates."""
    beta2, eps, corrects = group["betas"][1], group["eps"], group["bias_correction"]
    roots = list(torch._foreach_div(seconds, [1 - beta2**count if corrects and count else 1.0 for count in counts]))
    if group["eps_inside_sqrt"]:
        torch._foreach_add_(roots, eps)
    torch._foreach_sqrt_(roots)
    if not group["eps_inside_sqrt"]:
        torch._foreach_add_(roots, eps)
    return roots


def refuse_not_here(name: str, *, amsgrad: bool, max_grad_norm: float) -> None:
    """Refuse two arguments of DeepSpeed's signatures that no 1-bit optimizer supports.

    Raises:
        ConfigError: one of them is set; the message says what to do.
    """
    if amsgrad:
        raise ConfigError(f"amsgrad: found True, but {name} has no AMSGrad; leave it out")
    if max_grad_norm > 0:
        raise ConfigError(
            f"max_grad_norm: found {max_grad_norm!r}, but the engine clips, not {name}; remove it and set the "
            "top-level key gradient_clipping"
        )


def checked_count(name: str, value: Any) -> int:
    """Return `value` if it is an integer of at least 1.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: found {value!r}, but it must be an integer of at least 1")
    return value
