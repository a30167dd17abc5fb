"""The weights of a fused block: one buffer holds the weights of several linears, and the parameters are views of it.

So no weight exists twice, and the model's state dict keeps its names and values. The experts of a layer are computed by
two grouped products (see `moe.experts`) instead of a loop over experts; their weights stay in the module.

Shape legend: I input features, O output features, N tokens, K experts of a token, E experts, H features, F inner
features, of this rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.inference.quantized import PackedExperts
from deepspeed.moe.experts import grouped_linear
from deepspeed.ops.experts import by_expert
from deepspeed.ops.quantizer.layers import StoredExperts, StoredLayer
from deepspeed.ops.quantizer.packed import PackedWeight, packed_kernel, packed_linear, stack_packed
from deepspeed.ops.transformer import Linear, linear
from deepspeed.ops.transformer.linear import linear_kernel
from deepspeed.tensor_parallel.divide import is_plain_linear, ranks_of_experts
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from deepspeed.tensor_parallel.ranks import sum_over


class FusedLinear:
    """One product for linears with the same input: y = x [w_1; w_2; ...]^T + [b_1; b_2; ...].

    Args:
        linears: `torch.nn.Linear`, transformers' `Conv1D` ([I, O] weights), or divided column-parallel layers; either
            all weights are packed or none.

    Raises:
        ConfigError: a linear is of an unsupported kind, or its output is gathered; the message says which.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        self.linears: tuple[Any, ...] = tuple(linears)
        self.is_transposed = tuple(_is_transposed(each) for each in self.linears)
        self.sizes = tuple(
            _out_features(each, transposed) for each, transposed in zip(self.linears, self.is_transposed, strict=True)
        )
        self.fuse()

    def fuse(self) -> None:
        """Move the parameters into one buffer, [O, I], unless there is only one; the parameters become views of it."""
        self.packed = _fused_packed(self.linears)
        if self.packed is not None:
            self.bias = self._fused_bias()
            self._addresses = self._found_addresses()
            return
        with torch.no_grad():
            weights = [
                each.weight.detach().t() if transposed else each.weight.detach()
                for each, transposed in zip(self.linears, self.is_transposed, strict=True)
            ]
            if len(weights) == 1 and weights[0].is_contiguous():
                self.weight = weights[0]
            else:
                self.weight = torch.cat(weights).contiguous()
                rows = self.weight.split(self.sizes)
                for each, transposed, part in zip(self.linears, self.is_transposed, rows, strict=True):
                    each.weight.data = part.t() if transposed else part
            self.bias = self._fused_bias()
        self._addresses = self._found_addresses()

    def _found_addresses(self) -> list[int]:
        """Return the addresses of weight and bias of each linear in turn; 0 for None."""
        return [
            0 if each is None else each.data_ptr() for linear in self.linears for each in (linear.weight, linear.bias)
        ]

    def _fused_bias(self) -> Tensor | None:
        biases = [each.bias for each in self.linears]
        if all(bias is None for bias in biases):
            return None
        if len(biases) == 1:
            return biases[0].detach()
        one = next(bias for bias in biases if bias is not None)
        present = [
            one.new_zeros(size) if bias is None else bias.detach()
            for bias, size in zip(biases, self.sizes, strict=True)
        ]
        fused = torch.cat(present)
        for bias, part in zip(biases, fused.split(self.sizes), strict=True):
            if bias is not None:
                bias.data = part
        return fused

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        self._follow()
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        return linear(x, self.weight, self.bias)

    def _follow(self) -> None:
        if self._found_addresses() != self._addresses:  # a parameter was moved, cast or got other memory
            self.fuse()

    def as_linear(self, wide: Callable[[Tensor | None], Tensor | None]) -> Linear:
        """Return the current weight, and the current bias after `wide`."""
        self._follow()
        return Linear(self.weight if self.packed is None else self.packed, wide(self.bias))

    def step(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function for inputs like `x` and the current weights, which skips the checks of each call."""
        self._follow()
        if self.packed is not None:
            return packed_step(x, self.packed, self.bias)
        kernel = linear_kernel(x, self.weight, self.bias)
        weight, bias = self.weight, self.bias
        return self if kernel is None else lambda rows: kernel(rows, weight, bias)

    def release(self) -> None:
        """Give every parameter its own contiguous memory, with the same values."""
        with torch.no_grad():
            for each in self.linears:
                for parameter in (each.bias,) if self.packed is not None else (each.weight, each.bias):
                    if parameter is not None:
                        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def packed_step(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return `packed_linear` for inputs like `x`, without the checks of each call."""
    kernel = packed_kernel(x, packed, bias)
    if kernel is None:
        return lambda rows: packed_linear(rows, packed, bias)
    given = packed.arguments(bias)
    return lambda rows: kernel(rows, *given)


class OutputLayer:
    """Replaces the `forward` of a model's last linear, from features to the vocabulary.

    If a gradient is needed, the linear's own forward runs.

    Raises:
        ConfigError: see `FusedLinear`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.original = linear, linear.forward
        self.fused = FusedLinear([linear])

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        weight = self.linear.weight
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return self.original(x)
        return self.fused(x)

    def release(self) -> None:
        """Restore the linear's own forward."""
        del self.linear.forward


class FusedRowLinear(FusedLinear):
    """This rank's part of a row-parallel layer; a call sums over the ranks, and then adds the bias.

    Args:
        linear: the divided layer.
    """

    def __init__(self, linear: RowParallelLinear) -> None:
        super().__init__([linear])
        self._ranks, self._added = linear.ranks, linear

    def _fused_bias(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O], equal on all ranks."""
        total, bias = sum_over(super().__call__(x), self._ranks), self._added.bias
        return total if bias is None else total + bias

    def as_linear(self, wide: Callable[[Tensor | None], Tensor | None]) -> Linear:
        """Return this rank's part of the weight; the first rank has the whole bias, the others None."""
        return super().as_linear(wide)._replace(bias=wide(self._added.bias) if self._ranks.rank == 0 else None)


def output_linear(linear: nn.Module) -> FusedLinear:
    """Return the fused form of the last linear in a half of a layer."""
    return FusedRowLinear(linear) if isinstance(linear, RowParallelLinear) else FusedLinear([linear])


def _packed(linear: Any) -> PackedWeight | None:
    packed = getattr(linear, "packed", None)
    return packed if isinstance(packed, PackedWeight) else None


def _fused_packed(linears: Sequence[Any]) -> PackedWeight | None:
    """Return one packed weight with all rows; the linears' weights become views of it. None if they are not packed."""
    packed = [_packed(each) for each in linears]
    found = [each for each in packed if each is not None]
    if not found:
        return None
    ways = {(each.bits, each.floating, each.group_size, each.zeros is None) for each in found}
    if len(found) < len(packed) or len(ways) > 1:
        raise ConfigError("its linears have weights that are packed in different ways")
    if len(found) == 1:
        return found[0]
    rows = [each.shape[0] for each in found]
    fused = stack_packed(found)
    start = 0
    for each, length in zip(linears, rows, strict=True):
        each.packed_weights["weight"] = fused.narrow(0, start, length)  # whole consecutive rows: a view
        if isinstance(each, ColumnParallelLinear):
            each.weight.data = each.packed_weights["weight"].data
        start += length
    return fused


def _is_transposed(linear: nn.Module) -> bool:
    if _packed(linear) is not None and not getattr(linear, "gathered_sizes", ()):
        return False
    if isinstance(linear, ColumnParallelLinear):
        if linear.gathered_sizes:
            raise ConfigError("its linear is divided, and its output gathered")
        return linear.transposed
    if isinstance(linear, RowParallelLinear):
        return linear.transposed
    if is_plain_linear(linear) and not isinstance(linear, StoredLayer):
        return False
    if type(linear).__name__ == "Conv1D" and hasattr(linear, "nf"):
        return True
    raise ConfigError(f"its linear is a {type(linear).__name__}; torch.nn.Linear, Conv1D or a divided one is fused")


def _out_features(linear: nn.Module, transposed: bool) -> int:
    if (packed := _packed(linear)) is not None:
        return packed.shape[0]
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1 if transposed else 0]


_CLASSES = ("MixtralExperts",)


class FusedExperts:
    """Computes router and experts; it is called like the module that has them.

    Args:
        module: `gate` returns (logits, weights, indices), [N, K]; `experts` has `gate_up_proj`, [E, 2 F, H], and
            `down_proj`, [E, H, F], plain or packed.
        activation: activation of the gate.

    Raises:
        ConfigError: the experts are of an unsupported kind, or have hooks other than those of their division.
    """

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor]) -> None:
        self.router: nn.Module = module.gate
        self.experts: Any = module.experts
        self.activation = activation
        is_converted = isinstance(self.experts, PackedExperts | StoredExperts)
        self.num_experts: int = self.experts.num_held if is_converted else len(self.experts.down_proj)
        self.ranks = ranks_of_experts(self.experts)
        name = (self.experts.original if is_converted else type(self.experts)).__name__
        if name not in _CLASSES:
            raise ConfigError(f"its experts are {name}; {', '.join(_CLASSES)} are fused")
        hooks = len(self.experts._forward_hooks) + len(self.experts._forward_pre_hooks)
        if hooks != (0 if self.ranks is None else 2) or self.router._forward_hooks or self.router._forward_pre_hooks:
            raise ConfigError("its router or its experts have forward hooks, which a fused layer would not call")

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        _, weights_NK, index_NK = self.router(x.reshape(-1, x.shape[-1]))
        total = by_expert(x, index_NK, weights_NK, self.num_experts, self._run)
        return total if self.ranks is None else sum_over(total, self.ranks)

    def _run(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        gate, up = self._product(rows, "gate_up_proj", counts).chunk(2, -1)
        return self._product(self.activation(gate).mul_(up), "down_proj", counts)

    def _product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        if isinstance(self.experts, PackedExperts | StoredExperts):
            return self.experts.product(rows, name, counts)
        return grouped_linear(rows, getattr(self.experts, name), counts)
