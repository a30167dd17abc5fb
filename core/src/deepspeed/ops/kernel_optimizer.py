"""KernelOptimizer: an optimizer whose step is one operator call where an extension has it, and torch's where not."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from deepspeed.ops.reference_optimizer import ReferenceOptimizer
from deepspeed.ops.step_kernel import FP32, StepKernel, host_step_count, step_kernel

_T = TypeVar("_T")


class KernelOptimizer(ReferenceOptimizer):
    """Divides each group between the kernel and the torch reference beside it, and makes one-pass steps.

    A subclass names the operator, gives its numbers, and writes `create_state` and `update_reference`. To the reference
    go all parameters when there is no kernel or the group has options that it lacks, and otherwise those that it cannot
    take: sparse gradients, DTensors, tensors elsewhere or not contiguous, states in half precision.
    """

    kernel_op: ClassVar[str | None] = None  # what the registry is asked
    operator: ClassVar[str] = ""
    state_names: ClassVar[tuple[str, ...]] = ()  # the operator's state lists, in its order

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
        self._update(params, self.gradients(params, group), [], 1.0, group)

    def has_one_pass(self, group: dict[str, Any]) -> bool:
        kernel = self._kernel(self.kernel_numbers(group))
        return kernel is not None and kernel.takes(group["params"])

    def update_one_pass(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        self._update(params, grads, copies, scale, group)

    def _kernel(self, numbers: dict[str, Any] | None) -> StepKernel | None:
        return None if numbers is None else step_kernel(self.kernel_op, self.operator)

    def _update(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        states = [self._state_of(param, group) for param in params]
        numbers = self.kernel_numbers(group)
        kernel = self._kernel(numbers)
        served = [] if kernel is None else self._served(kernel, params, grads, states, copies)
        if kernel is not None and numbers is not None and served:
            mine, its_copies, its_states = _pick(params, served), _pick(copies, served), _pick(states, served)
            moments = [[state[name] for state in its_states] for name in self.state_names]
            steps = [host_step_count(state) for state in its_states]
            lists = [mine, _pick(grads, served), *moments, steps, its_copies]
            self.run_kernel(kernel.operator, lists, {**numbers, "grad_scale": scale})
            # autograd must hear of it: a graph that saved a weight then refuses to run backward through the new one
            torch.autograd.graph.increment_version([*mine, *its_copies])
        if len(served) < len(params):
            rest = sorted(set(range(len(params))) - set(served))
            self._update_rest(_pick(params, rest), _pick(grads, rest), _pick(copies, rest), scale, group)

    def _update_rest(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        if scale != 1.0:
            grads = [grad.to(param.dtype) * scale for param, grad in zip(params, grads, strict=True)]
        self.update_reference(params, grads, group)
        for copy, param in zip(copies, params, strict=bool(copies)):
            copy.copy_(param)

    def _served(
        self,
        kernel: StepKernel,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        copies: list[Tensor],
    ) -> list[int]:
        """The indices of the parameters that the kernel takes: nearly always all, which is asked first."""
        moments = [[state[name] for state in states] for name in self.state_names]
        tensors = [params, grads, *([copies] if copies else [])]
        if all(map(kernel.takes, tensors)) and all(kernel.takes(its, FP32) for its in moments):
            return list(range(len(params)))
        return [
            index
            for index in range(len(params))
            if kernel.takes([its[index] for its in tensors]) and kernel.takes([its[index] for its in moments], FP32)
        ]

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state.update(self.create_state(param, group))
        return state


def _pick(items: list[_T], indices: list[int]) -> list[_T]:
    """`items` at `indices`; the list itself when that is all of it, and when it is empty (no copies)."""
    return items if len(items) in (0, len(indices)) else [items[index] for index in indices]
