"""The base classes of the optimizers written here.

`ReferenceOptimizer` has the step loop, groups that are replaced in place, fp32 state and one-pass steps. The step of a
`KernelOptimizer` is one operator call where an extension has it, and torch's where not: an operator takes lists of
tensors and updates all of them in one call. Read next: `registry.py`, which finds it.
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
        """Check the options of a group, then add it as torch does; also called for the constructor's groups."""
        if isinstance(param_group, dict):  # else torch says what it must be
            check_options(**{name: value for name, value in param_group.items() if name in self.defaults})
        _unguarded(super().add_param_group)(param_group)

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
        _unguarded(super().zero_grad)(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the options of each group, as torch does."""
        return _unguarded(super().state_dict)()  # type: ignore[no-any-return]

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
            and all(map(_reads_no_gradients, self._optimizer_step_pre_hooks.values()))
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
        """Load as torch does, but keep fp32 state of a half parameter (torch would round it to that dtype)."""
        _unguarded(super().load_state_dict)(state_dict)
        saved_ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        owners = [(param, group) for group in self.param_groups for param in group["params"]]
        for key, (param, group) in zip(saved_ids, owners, strict=True):
            dtype = state_dtype(param, group)
            for name, value in state_dict["state"].get(key, {}).items():
                if dtype != param.dtype and name != "step" and isinstance(value, Tensor):
                    self.state[param][name] = value.to(device=param.device, dtype=dtype, copy=True)


def _unguarded(method: Any) -> Callable[..., Any]:
    """`method` of torch's optimizer without what keeps `torch.compile` out of it, as long as nobody compiles.

    That guard loads torch._dynamo and sympy: as much time as torch itself, and 70 MiB of every rank.
    """
    function = method.__func__
    if function.__code__ is not _GUARD or "torch._dynamo" in sys.modules:
        return method  # type: ignore[no-any-return]
    return MethodType(function.__wrapped__, method.__self__)


def _reads_no_gradients(hook: Callable[..., Any]) -> bool:
    """Whether a hook before the step is one that does not look at `param.grad`: it says so by an attribute."""
    return getattr(hook, "reads_no_gradients", False)


def _definer(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


class StepKernel(NamedTuple):
    """One operator, and the kind of device whose tensors it takes."""

    operator: Callable[..., Any]
    device_type: str

    def takes(self, tensors: Iterable[Tensor], dtypes: frozenset[torch.dtype] = FLOATS) -> bool:
        """Whether all are what the operator reads: plain, dense and contiguous, of one of `dtypes`, on its device."""
        strided, is_host, device_type = torch.strided, self.device_type == "cpu", self.device_type
        for one in tensors:  # written out, because it runs for every tensor of every step
            if one.dtype not in dtypes or type(one) not in PLAIN or one.layout is not strided:
                return False
            if not one.is_contiguous() or not (one.is_cpu if is_host else one.device.type == device_type):
                return False
        return True


def step_kernel(op: str | None, operator: str) -> StepKernel | None:
    """The operator that steps for `op`, or None: then the optimizer runs its torch reference.

    Args:
        op: as `registry.kernel` takes it, for example "cpu_adam"; None: the optimizer has none.
        operator: its name in the loaded op, for example "adam_step_".
    """
    loaded = registry.kernel(op) if op is not None else None
    if loaded is None:
        return None
    on_host = op in registry.OPS and registry.OPS[op].on_host
    device_type = "cpu" if on_host else torch.device(get_accelerator().device_name()).type
    packet = getattr(loaded, operator)
    return StepKernel(getattr(packet, "default", packet), device_type)  # the overload saves torch a search per call


def host_numbers(**values: Any) -> dict[str, float] | None:
    """Options as an operator takes them; None when one is a tensor on a device, which a step must not wait for."""
    for name, value in values.items():
        if type(value) is not float:  # they nearly always are
            if isinstance(value, Tensor) and value.device.type != "cpu":
                return None
            values[name] = float(value)
    return values


def host_step_counts(states: list[dict[str, Any]]) -> list[Tensor]:
    """`state["step"]` of each as operators count it: a 0-D fp32 tensor on the host, whatever a checkpoint held."""
    steps = [state["step"] for state in states]
    for index, step in enumerate(steps):
        if type(step) is not Tensor or step.dtype is not torch.float32 or not step.is_cpu or step.dim():
            steps[index] = states[index]["step"] = torch.tensor(float(step), dtype=torch.float32)
    return steps


class KernelOptimizer(ReferenceOptimizer):
    """Divides each group between the kernel and the torch reference beside it, and makes one-pass steps.

    A subclass names the operator, gives its numbers, and writes `create_state` and `update_reference`. To the reference
    go all parameters when there is no kernel or the group has options that it lacks, and otherwise those that it cannot
    take: sparse gradients, DTensors, tensors elsewhere or not contiguous, states in half precision.
    """

    kernel_op: ClassVar[str | None] = None  # its name in the registry
    operator: ClassVar[str] = ""
    state_names: ClassVar[tuple[str, ...]] = ()  # the operator's state lists, in its order
    uses_kernel = True  # False: step with the reference, as a rank that has no kernel does

    @abstractmethod
    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        """The operator's keyword arguments but `grad_scale`; None: the group has options that it lacks."""

    @abstractmethod
    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter at its first gradient."""

    @abstractmethod
    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Update `params` in place by torch's own operations; the states are there."""

    def gradients(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients of `params`, which all have one, for `update_params` to step with."""
        return [param.grad for param in params if param.grad is not None]

    def run_kernel(self, operator: Callable[..., Any], lists: list[Any], numbers: dict[str, Any]) -> None:
        """One operator call; a subclass whose operator takes more lists adds them."""
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
        """Whether the operator can be called here; loads it when first asked."""
        return self._found_kernel() is not None

    def _kernel(self, numbers: dict[str, Any] | None) -> StepKernel | None:
        return self._found_kernel() if numbers is not None and self.uses_kernel else None

    def _found_kernel(self) -> StepKernel | None:
        """Return the operator of the current accelerator. It is kept as long as the registry holds it."""
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
        """`unknown`: the lists to look at in every step before the operator gets them; empty for the engine's, whose
        gradients are as it wants them. Other tensors are looked at when they are new."""
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
            # for autograd: a graph that saved a weight then refuses to run backward through the new one
            torch.autograd.graph.increment_version([*params, *copies])

    def _took(self, lists: list[list[Tensor]]) -> bool:
        """Whether the kernel took these tensors in the last step. Then they are not looked at again: that would be a
        twentieth of a step of many small layers."""
        params = lists[0]
        before, addresses = self._known_tensors().get(id(params[0]), ((), []))
        if len(before) != len(lists) * len(params):
            return False
        are_same = all(map(operator.is_, map(weakref.ref.__call__, before), chain.from_iterable(lists)))
        return are_same and addresses == list(map(Tensor.data_ptr, params))  # a user may give a parameter other `.data`

    def _remember(self, lists: list[list[Tensor]]) -> None:
        known = self._known_tensors()
        for key in [key for key, (refs, _) in known.items() if refs[0]() is None]:
            del known[key]
        refs = [weakref.ref(one) for one in chain.from_iterable(lists)]
        known[id(lists[0][0])] = refs, list(map(Tensor.data_ptr, lists[0]))

    def _known_tensors(self) -> dict[int, tuple[list["weakref.ref[Tensor]"], list[int]]]:
        """Return the tensors that the kernel took, with the addresses of the parameters, by the id of the first
        parameter. The references to tensors are weak, as tensors come and go."""
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
    """The indices of the parameters that the kernel cannot take."""
    return [
        index
        for index in range(len(lists[0]))
        if not kernel.takes(its[index] for its in lists) or not kernel.takes((its[index] for its in moments), FP32)
    ]


def _pick(lists: list[list[Any]], indices: list[int]) -> list[list[Any]]:
    """Each of `lists` at `indices`; an empty one (no copies) stays empty."""
    return [[its[index] for index in indices] if its else [] for its in lists]


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
