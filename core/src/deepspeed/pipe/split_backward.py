"""`DeferredWeights` computes weight gradients after the gradients of activations (arXiv 2401.10241, section 2).

    deferred = DeferredWeights()
    with deferred.in_forward():
        outputs = module(inputs)
    with deferred.in_backward():
        torch.autograd.backward(outputs, gradients)      # gradients of the inputs
    torch.autograd.backward(deferred.roots())            # gradients of the weights

Only weights and biases of linear layers are deferred. For a product X W^T with the gradient Y of its result, the
gradient of X is Y W, and that of W is Y^T X, with equal work. Other gradients come with the gradients of the inputs.

[Note: what autograd sees] A layer is deferred only if the difference is not observable. It is not deferred if
saved-tensor hooks keep its inputs: activation checkpointing recomputes them outside `in_forward`, as new tensors. It is
not deferred if a hook gets the gradient of the weight or the bias and may replace it: autograd calls the hook in its
own backward, with the sum of all uses, and calls a post-accumulate hook even without a gradient. It is not deferred in
a nested backward that asks only for other gradients, as in implicit layers (`torch.autograd.grad` in a hook).

Autograd gets one deferred gradient per weight, the sum over its products, computed inside the backward. So no other
code holds the gradient, and autograd takes it without a copy. It would copy a gradient passed to
`torch.autograd.backward`, which takes a fourth of the time of the product in layers of a few hundred features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode


class _LinearProduct(NamedTuple):
    """`_LinearProduct` keeps the tensors of a linear layer, X W^T + b, that the gradients of W and b need."""

    weight: Parameter
    bias: Parameter | None
    inputs: Tensor
    version: int  # the version counter of `inputs`
    outputs: Tensor  # the gradient of the outputs

    def gradients(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield the weight and its gradient, then the bias and its gradient if there is a bias."""
        if self.inputs._version != self.version:
            raise RuntimeError(
                f"pipeline: the input of shape {tuple(self.inputs.shape)} of a linear layer was changed in place "
                "between the backward of its micro-batch and the gradient of its weight, which needs it; "
                'change a clone of it, or use "schedule": "1f1b"'
            )
        rows = self.outputs.reshape(-1, self.outputs.shape[-1])
        yield self.weight, rows.T @ self.inputs.reshape(-1, self.inputs.shape[-1])
        if self.bias is not None:
            yield self.bias, rows.sum(0)


class DeferredWeights:
    """`DeferredWeights` holds the deferred weight gradients of one micro-batch in one part."""

    def __init__(self) -> None:
        self._products: dict[int, list[_LinearProduct]] = {}  # by id of the weight
        self._defers = False

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Make linear layers that run inside deferrable."""
        with _LinearMode(self):
            yield

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Defer the weight gradients of these layers in a backward inside."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def roots(self) -> list[Tensor]:
        """Return the roots for the backward that computes the deferred gradients: one scalar per weight, including the
        biases that are used with the weight, however many layers share the weight. Autograd accumulates the gradients
        of one weight before it computes the gradients of the next."""
        roots = []
        for products in self._products.values():
            biases = {id(each.bias): each.bias for each in products if each.bias is not None}
            roots.append(_Left.apply(products, products[0].weight, *biases.values()))
        self._products = {}
        return roots

    def keep(self, weight: Parameter, bias: Parameter | None, inputs: Tensor, outputs: Tensor) -> bool:
        """Keep a layer's inputs and the gradient of its outputs for later. Returns whether the layer is deferred."""
        defers = self._defers and not _has_hooks(weight) and (bias is None or not _has_hooks(bias))
        if defers:
            product = _LinearProduct(weight, bias, inputs, inputs._version, outputs)
            self._products.setdefault(id(weight), []).append(product)
        return defers


class _LinearMode(TorchFunctionMode):
    """`_LinearMode` runs each deferrable `torch.nn.functional.linear` as a `_Linear`."""

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
    """Return the arguments of a `linear` call if it can be deferred, else None. It needs one dtype and trainable
    parameters; see [Note: what autograd sees]."""
    trains = isinstance(weight, Parameter) and weight.requires_grad and weight.dim() == 2
    has_bias = bias is None or (isinstance(bias, Parameter) and bias.requires_grad)
    if not trains or not has_bias or torch.is_autocast_enabled(input.device.type) or input.dtype != weight.dtype:
        return None
    if weight.is_complex():  # complex gradients have another formula
        return None
    others_keep = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if others_keep or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return input, weight, bias  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    """X W^T + b, with a backward that defers the gradients of W and b if possible."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredWeights, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.deferred, ctx.bias = deferred, bias
        outputs = F.linear(inputs, weight, bias)
        # with 3-D inputs the result is a view of a product that no other code holds; autograd does not let a layer
        # overwrite a view that a custom Function returns
        return torch.ops.aten._unsafe_view(outputs, outputs.shape) if outputs._is_view() else outputs

    @staticmethod
    def backward(ctx: Any, outputs: Tensor) -> Any:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        of_inputs = outputs @ weight if ctx.needs_input_grad[1] else None
        if _adds_up(ctx.next_functions[1:]) and ctx.deferred.keep(weight, ctx.bias, inputs.detach(), outputs):
            return None, of_inputs, None, None
        product = _LinearProduct(weight, ctx.bias, inputs, inputs._version, outputs)
        grads = [grad for _, grad in product.gradients()]
        return None, of_inputs, grads[0], grads[1] if ctx.bias is not None else None


class _Left(torch.autograd.Function):
    """A scalar whose backward computes the gradients of one weight's products."""

    @staticmethod
    def forward(ctx: Any, products: list[_LinearProduct], weight: Tensor, *biases: Tensor) -> Tensor:
        ctx.products = products
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        sums: dict[int, Tensor] = {}  # by id of the parameter, in the order of the arguments
        while ctx.products:
            for param, grad in ctx.products.pop(0).gradients():
                known = sums.get(id(param))
                sums[id(param)] = grad if known is None else known.add_(grad)
        return None, *sums.values()


def _adds_up(weights: Sequence[tuple[Any, int]]) -> bool:
    """Whether the running backward accumulates the gradients of these weights, rather than skipping or returning
    them."""
    try:
        return all(torch._C._will_engine_execute_node(node) for node, _ in weights if node is not None)
    except RuntimeError:  # torch.autograd.grad returns the gradients
        return False


def _has_hooks(param: Parameter) -> bool:
    """Whether the parameter has foreign hooks, before or after gradient accumulation. Hooks of ZeRO do not count after
    accumulation: they take the gradient that exists when they are called."""
    after = param._post_accumulate_grad_hooks
    return bool(param._backward_hooks) or (bool(after) and not all(map(_is_own, after.values())))


def _is_own(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")
