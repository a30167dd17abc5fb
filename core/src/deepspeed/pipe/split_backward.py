"""`DeferredWeights`: the gradients of weights computed later than those of activations (arXiv 2401.10241, section 2).

    deferred = DeferredWeights()
    with deferred.in_forward():
        outputs = module(inputs)
    with deferred.in_backward():
        torch.autograd.backward(outputs, gradients)      # gradients of the inputs
    torch.autograd.backward(deferred.roots())            # those of the weights

Deferred are the weights and biases of linear layers: for a product X W^T with the gradient Y of its result, the
gradient of X is Y W and that of W is Y^T X, of as much work each. All other gradients come with those of the inputs.

[Note: what autograd sees] A layer is deferred only where nobody can tell the difference. Not where somebody else keeps
its inputs: activation checkpointing computes them again outside of `in_forward`, as other tensors than were kept. Not
where a hook is to get the gradient of the weight or the bias, and may replace it: autograd calls it in its own
backward, with the sum of all uses; also without any gradient, if it is one that is called after the gradient was added
up. Not in a backward inside the backward that asks for other gradients only, as
implicit layers have it (`torch.autograd.grad` in a hook). What is deferred goes to the weight through autograd, as one
gradient of all its products, which is computed inside the backward: then nobody else holds it, and autograd takes it as
it is. Of a gradient that is handed to `torch.autograd.backward` it makes a copy, as long as a fourth of the product in
layers of a few hundred features.
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
    """A product X W^T + b in a backward keeps the tensors from which the gradients of W and b are computed."""

    weight: Parameter
    bias: Parameter | None
    inputs: Tensor
    version: int  # of `inputs`
    outputs: Tensor  # the gradient of them

    def gradients(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield the weight with its gradient, then the bias with its gradient where there is one."""
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
    """The weight gradients of one micro-batch in one part."""

    def __init__(self) -> None:
        self._products: dict[int, list[_LinearProduct]] = {}  # by id of the weight
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

    def roots(self) -> list[Tensor]:
        """Return the tensors from which the backward of the gradients that were left begins: a number for each weight,
        however many layers share it, with the biases that it is used with. Autograd adds the gradients of one weight up
        before it computes the gradients of the next weight."""
        roots = []
        for products in self._products.values():
            biases = {id(each.bias): each.bias for each in products if each.bias is not None}
            roots.append(_Left.apply(products, products[0].weight, *biases.values()))
        self._products = {}
        return roots

    def keep(self, weight: Parameter, bias: Parameter | None, inputs: Tensor, outputs: Tensor) -> bool:
        """Called in a backward with the inputs of a layer and the gradient of its outputs: whether it is deferred."""
        defers = self._defers and not _has_hooks(weight) and (bias is None or not _has_hooks(bias))
        if defers:
            product = _LinearProduct(weight, bias, inputs, inputs._version, outputs)
            self._products.setdefault(id(weight), []).append(product)
        return defers


class _LinearMode(TorchFunctionMode):
    """`_LinearMode` computes each `torch.nn.functional.linear` with a trained weight as a `_Linear`."""

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
        outputs = F.linear(inputs, weight, bias)
        # of inputs of three dimensions it is a view of a product that nobody else has; a layer that overwrites a view
        # which comes from a Function of one's own is refused
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
    """A number whose backward computes the gradients of products with one weight."""

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
    """Whether the backward that runs adds the gradients of these weights up, rather than leave them out or return
    them."""
    try:
        return all(torch._C._will_engine_execute_node(node) for node, _ in weights if node is not None)
    except RuntimeError:  # that they are returned
        return False


def _has_hooks(param: Parameter) -> bool:
    """Whether a hook of somebody else's is to get the gradient of a backward, before it is added up or after. Those of
    ZeRO take what is there whenever they are called."""
    after = param._post_accumulate_grad_hooks
    return bool(param._backward_hooks) or (bool(after) and not all(map(_is_own, after.values())))


def _is_own(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")
