"""What every optimizer written here shares: the step loop, groups replaced in place, fp32 state, one-pass steps."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ConfigError

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class OnePass:
    """Gradients of one step, given beside the parameters: of any float dtype, and not yet scaled.

    The tensors are plain, dense and contiguous, on the parameters' device: whoever makes this has seen to that.
    `grads[g]` and `copies[g]` belong to `param_groups[g]["params"]`. `copies[g]` is empty, or holds one tensor per
    parameter that gets the new value rounded to its dtype: the weights of a low-precision model.
    """

    grads: Sequence[list[Tensor]]
    copies: Sequence[list[Tensor]]
    scale: float  # unscales and clips in one factor


class ReferenceOptimizer(torch.optim.Optimizer):
    """A torch optimizer that an engine may hand other tensors: 1-D, empty, replaced in `param_groups`, without `.grad`.

    A subclass writes `update_params`, and makes a parameter's state at its first gradient. Options live in `defaults`
    and so in each group: they survive copy and pickle, and a group may say otherwise.

    One with a kernel that reads low-precision gradients, scales them, updates fp32 master weights and writes the
    low-precision weights in one pass over memory also writes `has_one_pass` and `update_one_pass`.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by `load_state_dict`: a dictionary of torch's own class lacks our keys."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; `None` means what the argument `set_grad_none` said, else to None."""
        if set_to_none is None:
            set_to_none = self.defaults.get("set_grad_none", True)
        super().zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, one_pass: OnePass | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure` returned, if there is one.

        The engine gives `one_pass` instead, after it has asked `takes_one_pass`.
        """
        if one_pass is not None:
            for group, grads, copies in zip(self.param_groups, one_pass.grads, one_pass.copies, strict=True):
                if grads:
                    self.update_one_pass(group["params"], grads, copies, one_pass.scale, group)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before_update()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self.update_params(params, group)
        return loss

    def before_update(self) -> None:
        """Called once per step, before the first group. For what looks at all gradients together."""

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update `params` in place; each has a gradient. Called per group, without autograd."""
        raise NotImplementedError(f"{type(self).__name__} must write update_params")

    @property
    def takes_one_pass(self) -> bool:
        """Whether `step(one_pass=...)` does what `step()` would do on the present groups.

        Not for a subclass with a step or update of its own, nor where a hook before the step wants to see gradients.
        """
        cls = type(self)
        is_ours = inspect.unwrap(cls.step) is inspect.unwrap(ReferenceOptimizer.step)
        is_paired = _definer(cls, "update_params") is _definer(cls, "update_one_pass")
        return (
            is_ours
            and is_paired
            and not self._optimizer_step_pre_hooks
            and all(map(self.has_one_pass, self.param_groups))
        )

    def has_one_pass(self, group: dict[str, Any]) -> bool:
        """Whether a kernel serves this group's options and tensors; loads it when first asked."""
        return False

    def update_one_pass(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        """Update `params` in place from `scale * grads`, and write `copies`; makes states at the first use."""
        raise NotImplementedError(f"{type(self).__name__} has no one-pass kernel; ask takes_one_pass first")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but fp32 state of a half parameter stays fp32 (torch would round it to the parameter's dtype)."""
        super().load_state_dict(state_dict)
        saved_ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        owners = [(param, group) for group in self.param_groups for param in group["params"]]
        for key, (param, group) in zip(saved_ids, owners, strict=True):
            dtype = state_dtype(param, group)
            for name, value in state_dict["state"].get(key, {}).items():
                if dtype != param.dtype and name != "step" and isinstance(value, Tensor):
                    self.state[param][name] = value.to(device=param.device, dtype=dtype, copy=True)


def _definer(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def state_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Dtype of a parameter's state: its own, or fp32 for a half parameter with `fp32_optimizer_states`."""
    wide = param.dtype in _HALF and group.get("fp32_optimizer_states", False)
    return torch.float32 if wide else param.dtype


def new_step_count() -> Tensor:
    """The count of updates as torch keeps it: a 0-D fp32 tensor on the host."""
    return torch.tensor(0.0, dtype=torch.float32)


def check_not_sparse(grad: Tensor, name: str) -> None:
    """RuntimeError, as torch raises it, for a sparse gradient that `name` cannot use."""
    if grad.is_sparse:
        raise RuntimeError(f"{name} does not support sparse gradients; use dense ones (sparse=False) or SGD, Adagrad")


def check_not_negative(**values: Any) -> None:
    """ConfigError naming the first value below 0 (or nan)."""
    for name, value in values.items():
        if not value >= 0.0:
            raise ConfigError(f"{name}: found {value!r}, but it must be at least 0")


def check_betas(betas: Iterable[float]) -> None:
    """ConfigError naming the first decay rate outside [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"betas[{index}]: found {beta!r}, but it must be in [0, 1)")
