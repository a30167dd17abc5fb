"""`DeferredWeights`: the gradients of weights computed later than those of activations (arXiv 2401.10241, section 2).

    deferred = DeferredWeights()
    with deferred.in_forward():
        outputs = module(inputs)
    with deferred.in_backward():
        torch.autograd.backward(outputs, gradients)      # gradients of the inputs
    for weight, gradient in deferred.gradients(): torch.autograd.backward(weight, gradient)    # those of the weights

Deferred are the weights and biases of linear layers: for a product X W^T with the gradient Y of its result, the
gradient of X is Y W and that of W is Y^T X, of as much work each. All other gradients come with those of the inputs.

[Note: what autograd sees] A layer is deferred only where nobody can tell the difference. Not where somebody else keeps
its inputs: activation checkpointing computes them again outside of `in_forward`, as other tensors than were kept. Not
where a hook is to get the gradient of the weight or the bias, and may replace it: autograd calls it in its own
backward, with the sum of all uses. Not in a backward inside the backward that asks for other gradients only, as
implicit layers have it (`torch.autograd.grad` in a hook). What is deferred goes to the weight through autograd, as one
gradient of all its products.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode


class DeferredWeights:
    """The weight gradients of one micro-batch in one part."""

    def __init__(self) -> None:
        #: by id of the weight: weight, bias, inputs and their version, gradient of the outputs
        self._products: dict[int, list[tuple[Parameter, Parameter | None, Tensor, int, Tensor]]] = {}
        self._defers = False

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Linear layers that run inside can be deferred."""
        with _LinearMode(self):
            yield

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """A backward inside leaves the gradients of these layers."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Weights and biases with their gradients: a weight that several layers share comes once, a bias as often as
        there are weights that it is used with."""
        while self._products:
            products = self._products.pop(next(iter(self._products)))
            of_all: dict[int, tuple[Tensor, Tensor]] = {}
            while products:
                weight, bias, inputs, version, outputs = products.pop(0)
                if inputs._version != version:
                    raise RuntimeError(
                        f"pipeline: the input of shape {tuple(inputs.shape)} of a linear layer was changed in place "
                        "between the backward of its micro-batch and the gradient of its weight, which needs it; "
                        'change a clone of it, or use "schedule": "1f1b"'
                    )
                for param, grad in _gradients(weight, bias, inputs, outputs):
                    known = of_all.get(id(param))
                    of_all[id(param)] = (param, grad if known is None else known[1].add_(grad))
            yield from of_all.values()

    def keep(self, weight: Parameter, bias: Parameter | None, inputs: Tensor, outputs: Tensor) -> bool:
        """Called in a backward with the inputs of a layer and the gradient of its outputs: whether it is deferred."""
        defers = self._defers and not _has_hooks(weight) and (bias is None or not _has_hooks(bias))
        if defers:
            self._products.setdefault(id(weight), []).append((weight, bias, inputs, inputs._version, outputs))
        return defers


class _LinearMode(TorchFunctionMode):
    """Inside, `torch.nn.functional.linear` with a trained weight is a `_Linear`."""

    def __init__(self, deferred: DeferredWeights) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            call = _linear_call(*args, **(kwargs or {}))
            if call is not None:
                return _Linear.apply(self._deferred, *call)
        return func(*args, **(kwargs or {}))


def _linear_call(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Parameter, Parameter | None] | None:
    """The arguments of a call of `linear` that can be deferred: of one dtype, with parameters that train; see
    [Note: what autograd sees]."""
    trains = isinstance(weight, Parameter) and weight.requires_grad and weight.dim() == 2
    has_bias = bias is None or (isinstance(bias, Parameter) and bias.requires_grad)
    if not trains or not has_bias or torch.is_autocast_enabled(input.device.type) or input.dtype != weight.dtype:
        return None
    if weight.is_complex():  # whose gradient is another formula
        return None
    others_keep = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if others_keep or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return input, weight, bias  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    """X W^T + b, whose backward asks whether the gradients of W and b are wanted now."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredWeights, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.deferred, ctx.bias = deferred, bias
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, outputs: Tensor) -> Any:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        of_inputs = outputs @ weight if ctx.needs_input_grad[1] else None
        if _adds_up(ctx.next_functions[1:]) and ctx.deferred.keep(weight, ctx.bias, inputs.detach(), outputs):
            return None, of_inputs, None, None
        grads = [grad for _, grad in _gradients(weight, ctx.bias, inputs, outputs)]
        return None, of_inputs, grads[0], grads[1] if ctx.bias is not None else None


def _gradients(weight: Tensor, bias: Tensor | None, inputs: Tensor, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the weight, and of the bias where there is one."""
    rows = outputs.reshape(-1, outputs.shape[-1])
    yield weight, rows.T @ inputs.reshape(-1, inputs.shape[-1])
    if bias is not None:
        yield bias, rows.sum(0)


def _adds_up(weights: Sequence[tuple[Any, int]]) -> bool:
    """Whether the backward that runs adds the gradients of these weights up, rather than leave them out or return
    them."""
    try:
        return all(torch._C._will_engine_execute_node(node) for node, _ in weights if node is not None)
    except RuntimeError:  # that they are returned
        return False


def _has_hooks(param: Parameter) -> bool:
    """Whether a hook is to get the gradient of a backward before it is added up."""
    return bool(param._backward_hooks)
