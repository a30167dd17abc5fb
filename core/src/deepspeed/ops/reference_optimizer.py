"""What every optimizer written here shares: the step loop, groups replaced in place, fp32 state, one-pass steps."""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

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

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        check_params(params)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also called for the groups that the constructor is given."""
        if isinstance(param_group, dict):  # else torch says what it must be
            check_options(**{name: value for name, value in param_group.items() if name in self.defaults})
        super().add_param_group(param_group)

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


def check_params(params: Any) -> None:
    """ConfigError for what is not an iterable of parameters or of param groups."""
    if isinstance(params, (Tensor, torch.nn.Module, str)) or not isinstance(params, Iterable):
        raise ConfigError(f"params: found a {type(params).__name__}; give model.parameters() or a list of param groups")


def check_options(**options: Any) -> None:
    """ConfigError naming the first option of a wrong type or out of range. Those that have no rule here may be
    anything. Called with the arguments of an optimizer, and with what a param group says."""
    for name, value in options.items():
        if name == "betas":
            _check_betas(value)
        elif name in _RULES and not _RULES[name].fits(value):
            _refuse(name, value, _RULES[name].words)


def _check_betas(betas: Any) -> None:
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        _refuse("betas", betas, "two numbers in [0, 1)")
    for index, beta in enumerate(betas):
        if not _DECAY.fits(beta):
            _refuse(f"betas[{index}]", beta, _DECAY.words)


def _refuse(name: str, value: Any, words: str) -> NoReturn:
    raise ConfigError(f"{name}: found {value!r}, but it must be {words}")


class _Rule(NamedTuple):
    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_SIZE = _Rule("a finite number of at least 0", lambda value: _is_number(value) and 0 <= value < math.inf)
_BOUND = _Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0)  # infinity: there is none
_DECAY = _Rule("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1)
_FLAG = _Rule("true or false", lambda value: not isinstance(value, Tensor) and value in (True, False))
_COUNT = _Rule(
    "an integer of at least 1",
    lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1,
)
_RULES = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "eps", "weight_decay"), _SIZE),
    **dict.fromkeys(("max_grad_norm", "min_coeff", "max_coeff"), _BOUND),
    **dict.fromkeys(("bias_correction", "adam_w_mode", "adamw_mode", "amsgrad", "eps_inside_sqrt", "nesterov"), _FLAG),
    "momentum": _DECAY,
    "ns_steps": _COUNT,
}
