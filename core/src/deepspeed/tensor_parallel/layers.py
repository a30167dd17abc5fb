"""Divided layers: column- and row-parallel linear (arXiv 1909.08053, section 3).

They take over the parameters of the layers that they replace, which `divide.py` has cut: names, optimizers and tied
weights keep them. Y = X A with A = [A_1, A_2] is column-parallel, with X = [X_1, X_2] and A over A_1, A_2 row-parallel.

Shape legend: I input features, O output features of the whole layer, i and o those of this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from deepspeed.errors import StateError
from deepspeed.ops.quantizer.packed import PackedWeight, packed_linear, unpack_weight
from deepspeed.parallel.model_part import whole_shape
from deepspeed.tensor_parallel.ranks import TensorRanks, gather_last_dim, scatter_sum, sum_gradient, sum_over


class HoldsPacked(Module):
    """A layer with weights that may be packed, for inference: then the packed ones move with the layer.

    State dicts have no form for them, so they are refused: without its scales a weight is not the model's. Within
    `widened` they have the numbers that they stand for.
    """

    #: by the name of the parameter whose place they take
    packed_weights: dict[str, PackedWeight]
    _widens_to: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self.packed_weights = {}

    def hold_packed(self, packed: dict[str, PackedWeight]) -> None:
        """Compute with these from now on; a parameter of the name is their bytes then, with its marks."""
        self.packed_weights = packed
        for name in packed:
            self._show(name)
        self.register_state_dict_pre_hook(_refuse_packed)
        self.register_load_state_dict_pre_hook(_refuse_packed)

    def bytes_of(self, name: str) -> Tensor:
        """Return the packed bytes, in the shape that the parameter has."""
        return self.packed_weights[name].data

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the numbers that a packed weight stands for, in the shape of the layer's weight; [out, in] here."""
        return unpack_weight(self.packed_weights[name], dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HoldsPacked":
        super()._apply(fn, recurse)
        for name, packed in list(self.packed_weights.items()):
            device = fn(packed.scales).device
            if device != packed.scales.device:
                self.packed_weights[name] = packed.to(device)
                self._show(name)
        return self

    def _show(self, name: str) -> None:
        former = self._parameters.get(name)
        if former is not None:
            shown = Parameter(self.bytes_of(name), requires_grad=False)
            vars(shown).update(vars(former))
            setattr(self, name, shown)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._widens_to is not None:
            for name in self.packed_weights:
                destination[f"{prefix}{name}"] = self.numbers_of(name, self._widens_to)


class MayBePacked(HoldsPacked):
    """A linear layer whose weight may be packed."""

    weight: Tensor
    transposed: bool = False  # the weight is [in, out], and packed as [out, in]

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weight that takes the weight's place; None: the weight is plain."""
        return self.packed_weights.get("weight")

    def pack(self, packed: PackedWeight) -> None:
        """Compute with `packed` from now on; a parameter `weight` is its bytes then, with its marks."""
        self.hold_packed({"weight": packed})

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the numbers that the packed weight stands for, [out, in], or [in, out] where `transposed`."""
        weight = super().numbers_of(name, dtype)
        return weight.t().contiguous() if self.transposed else weight


@contextmanager
def widened(module: Module, dtype: torch.dtype) -> Iterator[None]:
    """State dicts of `module` have packed weights as numbers of `dtype`, under the plain names, within this context."""
    layers = [each for each in module.modules() if isinstance(each, HoldsPacked) and each.packed_weights]
    for layer in layers:
        layer._widens_to = dtype
    try:
        yield
    finally:
        for layer in layers:
            layer._widens_to = None


def _refuse_packed(layer: Any, state: object, *_: object) -> None:
    if layer._widens_to is None:
        first = next(iter(layer.packed_weights.values()))
        verb, advice = ("load_state_dict", "load the weights") if isinstance(state, dict) else ("state_dict", "save it")
        raise StateError(
            f"{verb}: found a weight of {first.shape} that init_inference packed into {first.bits} bits, "
            f"for which a state dict has no place; {advice} before init_inference packs the model"
        )


class ColumnParallelLinear(MayBePacked):
    """This rank's output features of a linear layer.

    Args:
        weight: [o, I], or [I, o] if `transposed`, as transformers' Conv1D has it.
        bias: [o].
        block: that it begins, the same for all layers that do; see [Note: a divided block] in `ranks.py`. "": none.
        gathered_sizes: output features of every rank; then the output is whole. (): it stays divided.
    """

    bias: Parameter | None

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        ranks: TensorRanks,
        *,
        block: str = "",
        transposed: bool = False,
        gathered_sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.ranks, self.block, self.transposed, self.gathered_sizes = ranks, block, transposed, gathered_sizes
        self.reads_gathered = False  # set where the sequence is gathered before the block, which sums the gradient
        self.out_features, self.in_features = _sizes(weight, transposed=transposed)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., o], or [..., O] if it gathers."""
        if self.block:
            is_gathered = self.reads_gathered and self.ranks.sequence_is_divided
            input = self.ranks.enter(input, self.block, training=self.training, is_gathered=is_gathered)
        else:
            input = sum_gradient(input, self.ranks)
        output = _product(self, input, self.bias)
        return gather_last_dim(output, self.gathered_sizes, self.ranks) if self.gathered_sizes else output

    def extra_repr(self) -> str:
        return _shown(self, "column")


class RowParallelLinear(MayBePacked):
    """This rank's part of the sum over the input features of a linear layer; ends a divided block.

    Args:
        weight: [O, i], or [i, O] if `transposed`.
        bias: [O], added once, after the sum.
    """

    bias: Parameter | None

    def __init__(
        self, weight: Parameter, bias: Parameter | None, ranks: TensorRanks, *, transposed: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.ranks, self.transposed = ranks, transposed
        self.scatters_sequence = False  # set where the sequence is divided between blocks
        self.out_features, self.in_features = _sizes(weight, transposed=transposed)

    def forward(self, input: Tensor) -> Tensor:
        """[..., i] -> [..., O], equal on all ranks; [B, T, i] -> [B, T/W, O] where the sequence is divided."""
        self.ranks.leave()
        part = _product(self, input, None)
        scatters = self.scatters_sequence and self.ranks.sequence_is_divided
        total = scatter_sum(part, self.ranks) if scatters else sum_over(part, self.ranks)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        return _shown(self, "row")


def _product(layer: ColumnParallelLinear | RowParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias with this rank's weight."""
    if layer.packed is not None:
        return packed_linear(x, layer.packed, bias)
    return F.linear(x, layer.weight.t() if layer.transposed else layer.weight, bias)


def _sizes(weight: Parameter, *, transposed: bool) -> torch.Size:
    """[o, i] of this rank's weight."""
    shape = whole_shape(weight)
    return shape[::-1] if transposed else shape


def _shown(layer: ColumnParallelLinear | RowParallelLinear, kind: str) -> str:
    ranks = layer.ranks
    return f"{layer.in_features} -> {layer.out_features}, {kind} part {ranks.rank} of {ranks.world_size}"
