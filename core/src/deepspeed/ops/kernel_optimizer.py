"""KernelOptimizer: an optimizer whose step is one operator call where an extension has it, and torch's where not.

An operator takes lists of tensors and updates all of them in one call. Read next: `registry.py`, which finds it.
"""

import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import registry
from deepspeed.ops.reference_optimizer import ReferenceOptimizer

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
FP32 = frozenset((torch.float32,))
PLAIN = frozenset((Tensor, nn.Parameter))


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
        """What `update_params` steps with; `params` all have a gradient."""
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
        return step_kernel(self.kernel_op, self.operator) is not None

    def _kernel(self, numbers: dict[str, Any] | None) -> StepKernel | None:
        return step_kernel(self.kernel_op, self.operator) if numbers is not None and self.uses_kernel else None

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
        """With the addresses of the parameters; by the id of the first one. Weakly, as tensors come and go."""
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
