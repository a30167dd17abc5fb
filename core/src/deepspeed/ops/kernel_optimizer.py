"""KernelOptimizer: an optimizer whose step is one operator call where an extension has it, and torch's where not."""

from abc import abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.reference_optimizer import ReferenceOptimizer
from deepspeed.ops.step_kernel import FP32, StepKernel, host_step_count, step_kernel


class KernelOptimizer(ReferenceOptimizer):
    """Divides each group between the kernel and the torch reference beside it, and makes one-pass steps.

    A subclass names the operator, gives its numbers, and writes `create_state` and `update_reference`. To the reference
    go all parameters when there is no kernel or the group has options that it lacks, and otherwise those that it cannot
    take: sparse gradients, DTensors, tensors elsewhere or not contiguous, states in half precision.
    """

    kernel_op: ClassVar[str | None] = None  # what the registry is asked
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
        self._update(params, self.gradients(params, group), [], 1.0, group)

    def has_one_pass(self, group: dict[str, Any]) -> bool:
        kernel = self._kernel(self.kernel_numbers(group))
        return kernel is not None and kernel.takes(group["params"])

    def update_one_pass(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        self._update(params, grads, copies, scale, group)

    @property
    def has_kernel(self) -> bool:
        """Whether the operator can be called here; loads it when first asked."""
        return step_kernel(self.kernel_op, self.operator) is not None

    def _kernel(self, numbers: dict[str, Any] | None) -> StepKernel | None:
        return step_kernel(self.kernel_op, self.operator) if numbers is not None and self.uses_kernel else None

    def _update(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        states = [self._state_of(param, group) for param in params]
        numbers = self.kernel_numbers(group)
        kernel = self._kernel(numbers)
        if kernel is None or numbers is None:
            self._update_by_torch(params, grads, copies, scale, group)
            return
        moments = [[state[name] for state in states] for name in self.state_names]
        rest = _not_taken(kernel, [params, grads, copies], moments)
        if rest:
            its_params, its_grads, its_copies = _pick([params, grads, copies], rest)
            self._update_by_torch(its_params, its_grads, its_copies, scale, group)
            taken = sorted(set(range(len(params))) - set(rest))
            params, grads, copies, *moments = _pick([params, grads, copies, *moments], taken)
            states = [states[index] for index in taken]
        if params:
            lists = [params, grads, *moments, [host_step_count(state) for state in states], copies]
            self.run_kernel(kernel.operator, lists, {**numbers, "grad_scale": scale})
            # autograd must hear of it: a graph that saved a weight then refuses to run backward through the new one
            torch.autograd.graph.increment_version([*params, *copies])

    def _update_by_torch(
        self, params: list[Tensor], grads: list[Tensor], copies: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        if scale != 1.0:
            grads = [grad.to(param.dtype) * scale for param, grad in zip(params, grads, strict=True)]
        self.update_reference(params, grads, group)
        for copy, param in zip(copies, params, strict=bool(copies)):
            copy.copy_(param)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state.update(self.create_state(param, group))
        return state


def _not_taken(kernel: StepKernel, lists: list[list[Tensor]], moments: list[list[Tensor]]) -> list[int]:
    """The indices of the parameters that the kernel cannot take: nearly always none, which is asked first."""
    if kernel.takes(chain.from_iterable(lists)) and kernel.takes(chain.from_iterable(moments), FP32):
        return []
    return [
        index
        for index in range(len(lists[0]))
        if not kernel.takes(its[index] for its in lists if its)
        or not kernel.takes((its[index] for its in moments), FP32)
    ]


def _pick(lists: list[list[Tensor]], indices: list[int]) -> list[list[Tensor]]:
    """Each of `lists` at `indices`; an empty one (no copies) stays empty."""
    return [[its[index] for index in indices] if its else [] for its in lists]
