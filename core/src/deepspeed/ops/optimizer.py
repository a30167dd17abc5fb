"""The base classes of DeepSpeed's optimizers.

`ReferenceOptimizer` has the step loop, parameter groups whose tensors may be replaced, fp32 state and one-pass steps. A
`KernelOptimizer` makes its step with one operator call if an extension has the operator, else with torch. An operator
takes lists of tensors and updates all of them in one call. Read next: `registry.py`, which finds the operator.
"""

import inspect
import math
import numbers
import operator
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.ops import registry

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
FP32 = frozenset((torch.float32,))
PLAIN = frozenset((Tensor, nn.Parameter))
_HALF = (torch.float16, torch.bfloat16)
_GUARD = torch._disable_dynamo(lambda: None).__code__


@dataclass(slots=True)
class OnePass:
    """The unscaled gradients of one step, of any float dtype, which are not in `param.grad`.

    The caller guarantees plain, dense, contiguous tensors on the parameters' device. `grads[g]` and `copies[g]` belong
    to `param_groups[g]["params"]`. `copies[g]` is empty, or holds one tensor per parameter, for example the weights of
    a low-precision model. The step writes the new parameter value, rounded to the copy's dtype, into it.
    """

    grads: Sequence[list[Tensor]]
    copies: Sequence[list[Tensor]]
    scale: float  # unscales and clips in one factor


class ReferenceOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose tensors an engine may replace in `param_groups`: 1-D, empty, or without `.grad`.

    A subclass implements `update_params`, which creates a parameter's state at its first gradient. Options are stored
    in `defaults` and in each group: they survive copy and pickle, and a group may override them.

    A one-pass kernel reads low-precision gradients, scales them, updates fp32 master weights and writes the
    low-precision weights in one pass over memory. For it, a subclass implements `has_one_pass` and `update_one_pass`.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        check_params(params)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options of a group, then add the group as torch does. The constructor calls it for each group."""
        if isinstance(param_group, dict):  # else torch raises the error
            check_options(**{name: value for name, value in param_group.items() if name in self.defaults})
        _unguarded(super().add_param_group)(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state and add missing options. `load_state_dict` calls it: torch's own classes lack our keys."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients. `set_to_none=None` means the constructor's `set_grad_none`, or True if it has none."""
        if set_to_none is None:
            set_to_none = self.defaults.get("set_grad_none", True)
        _unguarded(super().zero_grad)(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the options of each group, as torch does."""
        return _unguarded(super().state_dict)()  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, one_pass: OnePass | None = None) -> Any:
        """Update every parameter that has a gradient. Return the result of `closure`, if given.

        The engine passes `one_pass` instead of `.grad` if `takes_one_pass` is True.
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
        """Run once per step, before the first group, for work that needs all gradients together."""

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update `params` in place. Each has a gradient. Called once per group, without autograd."""
        raise NotImplementedError(f"{type(self).__name__} must write update_params")

    @property
    def takes_one_pass(self) -> bool:
        """Whether `step(one_pass=...)` is equivalent to `step()` for the current groups.

        False for a subclass that overrides the step or the update, and if a step pre-hook reads gradients.
        """
        cls = type(self)
        is_ours = inspect.unwrap(cls.step) is inspect.unwrap(ReferenceOptimizer.step)
        is_paired = _definer(cls, "update_params") is _definer(cls, "update_one_pass")
        return (
            is_ours
            and is_paired
            and all(map(_reads_no_gradients, self._optimizer_step_pre_hooks.values()))
            and all(map(self.has_one_pass, self.param_groups))
        )

    def has_one_pass(self, group: dict[str, Any]) -> bool:
        """Return whether a kernel supports this group's options and tensors. The first call loads the kernel."""
        return False

    def update_one_pass(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        """Update `params` in place from `scale * grads`, and write `copies`. Creates states on first use."""
        raise NotImplementedError(f"{type(self).__name__} has no one-pass kernel; ask takes_one_pass first")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the fp32 state of a half-precision parameter, which torch would round."""
        _unguarded(super().load_state_dict)(state_dict)
        saved_ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        owners = [(param, group) for group in self.param_groups for param in group["params"]]
        for key, (param, group) in zip(saved_ids, owners, strict=True):
            dtype = state_dtype(param, group)
            for name, value in state_dict["state"].get(key, {}).items():
                if dtype != param.dtype and name != "step" and isinstance(value, Tensor):
                    self.state[param][name] = value.to(device=param.device, dtype=dtype, copy=True)


def _unguarded(method: Any) -> Callable[..., Any]:
    """Return `method` of torch's optimizer without its `torch.compile` guard, unless torch._dynamo is already loaded.

    The guard imports torch._dynamo and sympy, which takes as long as importing torch and 70 MiB on every rank.
    """
    function = method.__func__
    if function.__code__ is not _GUARD or "torch._dynamo" in sys.modules:
        return method  # type: ignore[no-any-return]
    return MethodType(function.__wrapped__, method.__self__)


def _reads_no_gradients(hook: Callable[..., Any]) -> bool:
    """Return whether a step pre-hook declares, by the attribute `reads_no_gradients`, that it ignores `param.grad`."""
    return getattr(hook, "reads_no_gradients", False)


def _definer(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


class StepKernel(NamedTuple):
    """An operator, and the device type of its tensors."""

    operator: Callable[..., Any]
    device_type: str

    def takes(self, tensors: Iterable[Tensor], dtypes: frozenset[torch.dtype] = FLOATS) -> bool:
        """Return whether all are plain, dense, contiguous, on the operator's device, and of one of `dtypes`."""
        strided, is_host, device_type = torch.strided, self.device_type == "cpu", self.device_type
        for one in tensors:  # an explicit loop, because it runs for every tensor in every step
            if one.dtype not in dtypes or type(one) not in PLAIN or one.layout is not strided:
                return False
            if not one.is_contiguous() or not (one.is_cpu if is_host else one.device.type == device_type):
                return False
        return True


def step_kernel(op: str | None, operator: str) -> StepKernel | None:
    """Return the operator that makes the step of `op`, or None if the optimizer must run its torch reference.

    Args:
        op: a name for `registry.kernel`, for example "cpu_adam"; None if the optimizer has no op.
        operator: the operator's name in the loaded op, for example "adam_step_".
    """
    loaded = registry.kernel(op) if op is not None else None
    if loaded is None:
        return None
    on_host = op in registry.OPS and registry.OPS[op].on_host
    device_type = "cpu" if on_host else torch.device(get_accelerator().device_name()).type
    packet = getattr(loaded, operator)
    return StepKernel(getattr(packet, "default", packet), device_type)  # the overload saves a lookup per call


def host_numbers(**values: Any) -> dict[str, float] | None:
    """Convert options to floats. Return None if one is a tensor on a device: reading it would make the step wait."""
    for name, value in values.items():
        if type(value) is not float:  # the fast path: nearly all are floats
            if isinstance(value, Tensor) and value.device.type != "cpu":
                return None
            values[name] = float(value)
    return values


def host_step_counts(states: list[dict[str, Any]]) -> list[Tensor]:
    """Return `state["step"]` of each state as a 0-D fp32 tensor on the host, converting counts from a checkpoint."""
    steps = [state["step"] for state in states]
    for index, step in enumerate(steps):
        if type(step) is not Tensor or step.dtype is not torch.float32 or not step.is_cpu or step.dim():
            steps[index] = states[index]["step"] = torch.tensor(float(step), dtype=torch.float32)
    return steps


class KernelOptimizer(ReferenceOptimizer):
    """Divides each group between the kernel and the torch reference, and makes one-pass steps.

    A subclass sets the operator, and implements `kernel_numbers`, `create_state` and `update_reference`. The reference
    updates all parameters if no kernel supports the group's options, else only those that the kernel cannot take:
    with sparse gradients, DTensors, tensors on another device or not contiguous, or half-precision states.
    """

    kernel_op: ClassVar[str | None] = None  # the op's name in the registry
    operator: ClassVar[str] = ""
    state_names: ClassVar[tuple[str, ...]] = ()  # the operator's state lists, in its argument order
    uses_kernel = True  # False: always use the reference, like a rank without the kernel

    @abstractmethod
    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        """Return the operator's keyword arguments except `grad_scale`; None if it lacks an option of the group."""

    @abstractmethod
    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the initial state of a parameter."""

    @abstractmethod
    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Update `params` in place with torch operations. All states exist."""

    def gradients(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients that `update_params` uses. Every parameter in `params` has a gradient."""
        return [param.grad for param in params if param.grad is not None]

    def run_kernel(self, operator: Callable[..., Any], lists: list[Any], numbers: dict[str, Any]) -> None:
        """Call the operator once. A subclass whose operator takes more lists adds them here."""
        operator(*lists, **numbers)

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = self.gradients(params, group)
        self._update(params, grads, [], 1.0, group, unknown=[params, grads])

    def has_one_pass(self, group: dict[str, Any]) -> bool:
        kernel = self._kernel(self.kernel_numbers(group))
        return kernel is not None and kernel.takes(group["params"][:1])  # `update_one_pass` checks them all

    def update_one_pass(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        self._update(params, grads, copies, scale, group, unknown=[])

    @property
    def has_kernel(self) -> bool:
        """Whether the operator is available here. The first access loads it."""
        return self._found_kernel() is not None

    def _kernel(self, numbers: dict[str, Any] | None) -> StepKernel | None:
        return self._found_kernel() if numbers is not None and self.uses_kernel else None

    def _found_kernel(self) -> StepKernel | None:
        """Return the operator of the current accelerator. The result is cached while `registry.holds` is True."""
        table, kernel = self.__dict__.get("_kept_kernel", (None, None))
        if not registry.holds(table):
            kernel = step_kernel(self.kernel_op, self.operator)
            self.__dict__["_kept_kernel"] = registry.table, kernel
        return kernel  # type: ignore[no-any-return]

    def _update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        copies: list[Tensor],
        scale: float,
        group: dict[str, Any],
        *,
        unknown: list[list[Tensor]],
    ) -> None:
        """Update `params`. `unknown` are the lists to check in every step; it is empty if the engine provides the
        gradients. Other tensors are checked only when they are new."""
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                state.update(self.create_state(param, group))
        numbers = self.kernel_numbers(group)
        kernel = self._kernel(numbers)
        if kernel is None or numbers is None:
            self._update_by_torch(params, grads, copies, scale, group)
            return
        moments = [[state[name] for state in states] for name in self.state_names]
        steps = [state["step"] for state in states]
        if not (kernel.takes(chain.from_iterable(unknown)) and self._took([params, steps, *moments])):
            rest = _not_taken(kernel, unknown or [params], moments)
            if rest:
                its_params, its_grads, its_copies = _pick([params, grads, copies], rest)
                self._update_by_torch(its_params, its_grads, its_copies, scale, group)
                taken = sorted(set(range(len(params))) - set(rest))
                params, grads, copies, states, *moments = _pick([params, grads, copies, states, *moments], taken)
            steps = host_step_counts(states)
            if not rest:
                self._remember([params, steps, *moments])
        if params:
            lists = [params, grads, *moments, steps, copies]
            self.run_kernel(kernel.operator, lists, {**numbers, "grad_scale": scale})
            # for autograd: a graph that saved the old weight then refuses to run backward
            torch.autograd.graph.increment_version([*params, *copies])

    def _took(self, lists: list[list[Tensor]]) -> bool:
        """Return whether the kernel took these tensors in the last step. They need no second check, which would cost 5%
        of a step with many small layers."""
        params = lists[0]
        before, addresses = self._known_tensors().get(id(params[0]), ((), []))
        if len(before) != len(lists) * len(params):
            return False
        are_same = all(map(operator.is_, map(weakref.ref.__call__, before), chain.from_iterable(lists)))
        return are_same and addresses == list(map(Tensor.data_ptr, params))  # a user may assign another `.data`

    def _remember(self, lists: list[list[Tensor]]) -> None:
        known = self._known_tensors()
        for key in [key for key, (refs, _) in known.items() if refs[0]() is None]:
            del known[key]
        refs = [weakref.ref(one) for one in chain.from_iterable(lists)]
        known[id(lists[0][0])] = refs, list(map(Tensor.data_ptr, lists[0]))

    def _known_tensors(self) -> dict[int, tuple[list["weakref.ref[Tensor]"], list[int]]]:
        """Return id of the first parameter -> (weak references to the tensors that the kernel took, addresses of the
        parameters)."""
        return self.__dict__.setdefault("_known", {})  # type: ignore[no-any-return]

    def _update_by_torch(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        if scale != 1.0:
            grads = [grad.to(param.dtype) * scale for param, grad in zip(params, grads, strict=True)]
        self.update_reference(params, grads, group)
        for copy, param in zip(copies, params, strict=bool(copies)):
            copy.copy_(param)


def _not_taken(kernel: StepKernel, lists: list[list[Tensor]], moments: list[list[Tensor]]) -> list[int]:
    """Return the indices of the parameters that the kernel cannot take."""
    return [
        index
        for index in range(len(lists[0]))
        if not kernel.takes(its[index] for its in lists) or not kernel.takes((its[index] for its in moments), FP32)
    ]


def _pick(lists: list[list[Any]], indices: list[int]) -> list[list[Any]]:
    """Select `indices` from each of `lists`; an empty list (no copies) stays empty."""
    return [[its[index] for index in indices] if its else [] for its in lists]


def state_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return fp32 for a half-precision parameter with `fp32_optimizer_states`, else the parameter's dtype."""
    wide = param.dtype in _HALF and group.get("fp32_optimizer_states", False)
    return torch.float32 if wide else param.dtype


def new_step_count() -> Tensor:
    """Return a step count of 0 in torch's format: a 0-D fp32 tensor on the host."""
    return torch.tensor(0.0, dtype=torch.float32)


def check_not_sparse(grad: Tensor, name: str) -> None:
    """Raise a RuntimeError, as torch does, if `grad` is sparse and the optimizer `name` does not support it."""
    if grad.is_sparse:
        raise RuntimeError(f"{name} does not support sparse gradients; use dense ones (sparse=False) or SGD, Adagrad")


def check_params(params: Any) -> None:
    """Raise a ConfigError if `params` is not an iterable of parameters or of param groups."""
    if isinstance(params, (Tensor, torch.nn.Module, str)) or not isinstance(params, Iterable):
        raise ConfigError(f"params: found a {type(params).__name__}; give model.parameters() or a list of param groups")


def check_options(**options: Any) -> None:
    """Raise a ConfigError for the first option of a wrong type or out of range. Options without a rule are not checked.
    Called with an optimizer's arguments, and with the options of a param group."""
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
_BOUND = _Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0)  # infinity means no bound
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
