"""`ZeroOneAdam`: Adam that updates the second moment, and synchronizes the ranks, at growing intervals.

The communication of a step depends only on its number, so all ranks, and a resumed run, agree:

    update t <= var_freeze_step    if an update of the second moment is due: average the gradients in full precision;
                                   else average the momentum in one bit per element
    update t > var_freeze_step     average the momentum in one bit per element at the end of an interval, which grows
                                   from 1 to `local_step_clipper` updates; otherwise no communication
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed._absent import absent_members
from deepspeed.optim.one_bit import (
    OneBitOptimizer,
    checked_count,
    dense_gradients,
    mask_momentum,
    roots_of,
    step_by_moments,
    update_variances,
)


def is_variance_due(update: int, scaler: int) -> bool:
    """Return whether update number `update`, counted from 1, updates the second moment: `scaler` times after each
    update, then `scaler` times after every second update, every fourth update, and so on.

    >>> [update for update in range(1, 20) if is_variance_due(update, 4)]
    [1, 2, 3, 4, 5, 7, 9, 11, 13, 17]
    """
    gap, since = _gap(update, scaler)
    return since % gap == 0


def num_variances(update: int, scaler: int) -> int:
    """Return the number of updates of the second moment up to and including this update.

    >>> [num_variances(update, 4) for update in (1, 5, 6, 7, 13, 17)]
    [1, 5, 5, 6, 9, 10]
    """
    gap, since = _gap(update, scaler)
    return scaler * (gap.bit_length() - 1) + since // gap + 1


def is_sync_due(local: int, scaler: int, clipper: int) -> bool:
    """Return whether the ranks synchronize after this update, counted from 1 after the second moment is frozen.

    >>> [update for update in range(1, 25) if is_sync_due(update, 6, 4)]
    [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24]
    """
    return local % min(2 ** min((local - 1) // scaler, 62), clipper) == 0


def _gap(update: int, scaler: int) -> tuple[int, int]:
    """Return the current interval between updates of the second moment, and the number of updates since it began."""
    doublings = math.floor(math.log2((update - 1) / scaler + 1))
    return 2**doublings, update - 1 - scaler * (2**doublings - 1)


@dataclass(slots=True)
class _LocalSteps:
    """The accumulated local updates of a parameter since the last synchronization of the ranks."""

    start: Tensor  # the value at the synchronization, with weight decay since then
    moved: Tensor  # sum of momentum times learning rate, with weight decay
    weight: float = 0.0  # sum of learning rates, with weight decay
    left: Tensor | None = None  # digest of the value after the last local update
    changed: Tensor | None = None  # 0-D: whether other code changed the value after a local update

    def note_change(self, param: Tensor) -> None:
        """Record whether the value differs from the last `note_update`, without a device synchronization."""
        if self.left is not None:
            differs = _digest(param) != self.left
            self.changed = differs if self.changed is None else self.changed | differs

    def note_update(self, param: Tensor) -> None:
        self.left = _digest(param)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(param: Tensor) -> Tensor:
    """Return the sum of a tensor's words as integers, 0-D. Nearly every change of the tensor changes it."""
    return param.detach().reshape(-1).view(_WORDS[param.element_size()]).sum()


@absent_members("runtime.fp16.onebit.zoadam:ZeroOneAdam")
class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (Y. Lu et al., arXiv 2202.06009, algorithm 1), with Adam's bias correction and AdamW's decay.

    Update t, with V = `var_freeze_step`, A(x) the one-bit average over ranks, D = sqrt(v / c2) + eps and l = lr / c1:

        t <= V, v due       m <- b1 * m + (1 - b1) * g              g is the average over ranks
                            v <- b2 * v + (1 - b2) * g^2
        t <= V otherwise    m <- A(b1 * m + (1 - b1) * g)           g is the local gradient
                            p <- p * (1 - lr * wd) - l * m / D      in both cases
        t > V               m <- b1 * m + (1 - b1) * g              g is the local gradient
                            p <- p * (1 - lr * wd) - l * m / D      on each rank separately
                            s, u, L <- s, u, L * (1 - lr * wd);  u <- u + l * m;  L <- L + l
          synchronize       m <- A(u / L);  p <- s - L * m / D;  s <- p;  u, L <- 0

    c1 = c2 = 1; with bias_correction as in Adam, by the numbers of updates of p and of v. Unlike in the paper, v is
    updated before the weights, as in Adam, and A is applied to momenta, not to momenta times learning rates, so that
    the rounding errors do not scale with the learning rate.

    Between two synchronizations the weights differ between ranks; a checkpoint then has the weights of the first rank.
    If other code changes a weight in between, the synchronization averages the ranks' weights instead of using s.

    Args:
        params, deepspeed, bias_correction, eps_inside_sqrt: see `OnebitAdam`, also for `exp_avg_mask` of a group.
        var_freeze_step: number of updates of the first phase, at least 1.
        var_update_scaler: number of updates of v until the interval between them doubles.
        local_step_scaler: number of updates of the second phase until the synchronization interval doubles.
        local_step_clipper: the longest synchronization interval.

    Raises ConfigError for a value out of range, for `amsgrad=True` and for `max_grad_norm`.
    """

    #: number of the current update, counted from 1
    _update = 1

    phase_options = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")

    def __init__(
        self,
        params: Iterable[Any],
        deepspeed: Any = None,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
    ) -> None:
        self.var_freeze_step = checked_count("var_freeze_step", var_freeze_step)
        self.var_update_scaler = checked_count("var_update_scaler", var_update_scaler)
        self.local_step_scaler = checked_count("local_step_scaler", local_step_scaler)
        self.local_step_clipper = checked_count("local_step_clipper", local_step_clipper)
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
        self._local: dict[Tensor, _LocalSteps] = {}

    def begin_phase(self) -> None:
        self._update = self.num_updates + 1
        self.keeps_gradients = not self._updates_variance

    @property
    def _updates_variance(self) -> bool:
        return self._update <= self.var_freeze_step and is_variance_due(self._update, self.var_update_scaler)

    def restore_rounding(self, saved: Mapping[Tensor, Sequence[Tensor] | None]) -> None:
        self._local = {}
        super().restore_rounding(saved)

    @torch.no_grad()
    def finish_update(self) -> list[Tensor]:
        if not self._local or not self._meets:
            return []
        left = list(self._local)
        for group in self.param_groups:
            params = [param for param in group["params"] if param in self._local]
            if params:
                self._meet(params, group)
        return left

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        params = self.trained(params, group)
        if not params:
            return
        states = self.moments_of(params)
        grads = dense_gradients(params, type(self).__name__)
        beta1, beta2 = group["betas"]
        firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        if self._updates_variance:
            update_variances(states, grads, beta2)
        elif self._update <= self.var_freeze_step or self._meets_always:
            self.average(params, firsts)
            mask_momentum(firsts, seconds, group)
        else:
            self._step_locally(params, states, group)
            return
        step_by_moments(params, states, group)

    @property
    def _meets_always(self) -> bool:
        """Whether the ranks synchronize in this update, and no parameter has local updates from before."""
        return not self._local and self._meets

    @property
    def _meets(self) -> bool:
        """Whether the ranks synchronize after this update, if the second moment is frozen."""
        return is_sync_due(self._update - self.var_freeze_step, self.local_step_scaler, self.local_step_clipper)

    @property
    def is_frozen(self) -> bool:
        return self._update > self.var_freeze_step

    def past_variances(self, step: int) -> int:
        last = min(self._update - 1, self.var_freeze_step)  # the optimizer's count decides when v is updated
        return num_variances(last, self.var_update_scaler) if last > 0 else 0

    def _step_locally(self, params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
        """Make an update of the second phase, and synchronize the ranks if due."""
        (beta1, _), lr = group["betas"], float(group["lr"])
        keeps = 1 - lr * group["weight_decay"]
        firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        mask_momentum(firsts, seconds, group)
        for param, first, root in zip(params, firsts, roots_of(states, group), strict=True):
            if param not in self._local:
                self._local[param] = _LocalSteps(param.clone(), torch.zeros_like(param))
            own, step = self._local[param], int(self.state[param]["step"])
            own.note_change(param)
            rate = lr / (1 - beta1**step) if group["bias_correction"] else lr
            own.start.mul_(keeps)
            own.moved.mul_(keeps).add_(first, alpha=rate)
            own.weight = own.weight * keeps + rate
            param.mul_(keeps).addcdiv_(first, root, value=-rate)
            own.note_update(param)
        if self._meets:
            self._meet(params, group)

    def _meet(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Synchronize the local updates of some parameters of a group across ranks. A collective."""
        moved = [self._local.pop(param) for param in params]
        states = [self.state[param] for param in params]
        firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        roots = roots_of(states, group)
        self._average_changed(params, moved)
        for first, own in zip(firsts, moved, strict=True):
            if own.weight > 0:
                first.copy_(own.moved).div_(own.weight)
        self.average(params, firsts)
        mask_momentum(firsts, seconds, group)
        for param, first, root, own in zip(params, firsts, roots, moved, strict=True):
            if own.changed is None:
                param.copy_(own.start).addcdiv_(first, root, value=-own.weight)

    def _average_changed(self, params: list[Tensor], moved: list[_LocalSteps]) -> None:
        """Average each weight that other code has changed on some rank. Reset `changed` of the others to None. A
        collective."""
        for param, own in zip(params, moved, strict=True):
            own.note_change(param)
        flags_N = torch.stack([_flag(param, own.changed) for param, own in zip(params, moved, strict=True)])
        if self.ranks is not None:
            self.ranks.all_reduce(flags_N, tag="changed weights").wait()
        for param, own, flag in zip(params, moved, flags_N.tolist(), strict=True):
            if flag == 0:
                own.changed = None
            elif self.ranks is not None:
                mean_N = param.detach().reshape(-1).clone()
                self.ranks.all_reduce(mean_N, tag="changed weights").wait()
                param.copy_(mean_N.div_(self.ranks.world_size).view(param.shape))


def _flag(param: Tensor, changed: Tensor | None) -> Tensor:
    """Return `changed` as 1 or 0 on the parameter's device, 0-D fp32."""
    zero = torch.zeros((), dtype=torch.float32, device=param.device)
    return zero if changed is None else zero + changed
