"""`ZeroOneAdam`: Adam whose second moment is updated ever more rarely, and whose ranks meet ever more rarely.

What a step sends follows from its number alone, so all ranks agree, and so does a run that was resumed:

    update t <= var_freeze_step    if the second moment is due: the gradients, averaged as they are; else the momentum
                                   in one bit per element
    update t > var_freeze_step     nothing, but for one bit per element of momentum at the end of an interval, which
                                   grows from 1 to `local_step_clipper` updates
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed._absent_members import absent_members
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
    """Whether the second moment is updated in this update, counted from 1: `scaler` times after each update, as often
    after every second, every fourth and so on.

    >>> [update for update in range(1, 20) if is_variance_due(update, 4)]
    [1, 2, 3, 4, 5, 7, 9, 11, 13, 17]
    """
    gap, since = _gap(update, scaler)
    return since % gap == 0


def num_variances(update: int, scaler: int) -> int:
    """Updates of the second moment up to and with this update.

    >>> [num_variances(update, 4) for update in (1, 5, 6, 7, 13, 17)]
    [1, 5, 5, 6, 9, 10]
    """
    gap, since = _gap(update, scaler)
    return scaler * (gap.bit_length() - 1) + since // gap + 1


def is_sync_due(local: int, scaler: int, clipper: int) -> bool:
    """Whether the ranks average at the end of this update, counted from 1 after the second moment was frozen.

    >>> [update for update in range(1, 25) if is_sync_due(update, 6, 4)]
    [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24]
    """
    return local % min(2 ** min((local - 1) // scaler, 62), clipper) == 0


def _gap(update: int, scaler: int) -> tuple[int, int]:
    """Return after how many updates the second moment is updated around this one, and the updates since that began."""
    doublings = math.floor(math.log2((update - 1) / scaler + 1))
    return 2**doublings, update - 1 - scaler * (2**doublings - 1)


@dataclass(slots=True)
class _LocalSteps:
    """`_LocalSteps` keep what the updates of a parameter have done since the ranks averaged."""

    start: Tensor  # its value then, decayed since
    moved: Tensor  # momentum times learning rate, added up, decayed as well
    weight: float = 0.0  # learning rates, added up alike
    left: Tensor | None = None  # the digest of its value after the last of these updates
    changed: Tensor | None = None  # 0-D: whether somebody else changed its value after one of them

    def note_change(self, param: Tensor) -> None:
        """See whether the value is another than `note_update` left; nobody waits for the answer here."""
        if self.left is not None:
            differs = _digest(param) != self.left
            self.changed = differs if self.changed is None else self.changed | differs

    def note_update(self, param: Tensor) -> None:
        self.left = _digest(param)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(param: Tensor) -> Tensor:
    """The sum of a tensor's words as integers: 0-D, and another one after nearly every change."""
    return param.detach().reshape(-1).view(_WORDS[param.element_size()]).sum()


@absent_members("runtime.fp16.onebit.zoadam:ZeroOneAdam")
class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (Y. Lu et al., arXiv 2202.06009, algorithm 1), with Adam's bias correction and AdamW's decay.

    Of update t, with V = `var_freeze_step`, A(x) the average over ranks in one bit, D = sqrt(v / c2) + eps and
    l = lr / c1:

        t <= V, v due       m <- b1 * m + (1 - b1) * g              g the average over ranks
                            v <- b2 * v + (1 - b2) * g^2
        t <= V otherwise    m <- A(b1 * m + (1 - b1) * g)           g this rank's own
                            p <- p * (1 - lr * wd) - l * m / D      in both
        t > V               m <- b1 * m + (1 - b1) * g              g this rank's own
                            p <- p * (1 - lr * wd) - l * m / D      on each rank by itself
                            s, u, L <- s, u, L * (1 - lr * wd);  u <- u + l * m;  L <- L + l
          ranks meet        m <- A(u / L);  p <- s - L * m / D;  s <- p;  u, L <- 0

    c1 = c2 = 1, or with bias_correction as in Adam, of the updates that p and v have had. Other than in the paper, v
    is updated before the weights, as in Adam, and A is taken of momenta, not of momenta times learning rates, so that
    what is left to send does not change its size with the learning rate.

    Between two meetings of the ranks weights differ on them; what is saved then is those of the first. A weight that
    somebody else changes in between is not made of s when the ranks meet: it gets the average of the ranks' weights.

    Args:
        params, deepspeed, bias_correction, eps_inside_sqrt: as in `OnebitAdam`, and so is `exp_avg_mask` of a group.
        var_freeze_step: updates of the first phase, at least 1.
        var_update_scaler: updates of v until the gap between them doubles.
        local_step_scaler: updates of the second phase until the interval between meetings doubles.
        local_step_clipper: the longest interval.

    Raises ConfigError for a value out of range, for `amsgrad=True` and for `max_grad_norm`.
    """

    #: the update that is being made, counted from 1
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
        """Whether the ranks average after each update around this one, and no parameter has moved without that."""
        return not self._local and self._meets

    @property
    def _meets(self) -> bool:
        """Whether the ranks average at the end of this update, if the second moment is frozen."""
        return is_sync_due(self._update - self.var_freeze_step, self.local_step_scaler, self.local_step_clipper)

    @property
    def is_frozen(self) -> bool:
        return self._update > self.var_freeze_step

    def past_variances(self, step: int) -> int:
        last = min(self._update - 1, self.var_freeze_step)  # v is due by the updates of the optimizer
        return num_variances(last, self.var_update_scaler) if last > 0 else 0

    def _step_locally(self, params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
        """An update of the second phase, and the meeting of the ranks where it is due."""
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
        """Bring what some parameters of a group have done since the last meeting to all ranks. A collective."""
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
        """Average the weights as they are where some rank says that its own was changed, and keep `changed` of these
        only. A collective."""
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
    """Return 1 or 0 beside a parameter, 0-D fp32."""
    zero = torch.zeros((), dtype=torch.float32, device=param.device)
    return zero if changed is None else zero + changed
