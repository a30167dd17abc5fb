"""Divided layers: column- and row-parallel linear (arXiv 1909.08053, section 3).

They reuse the parameters of the layers that they replace, which `divide.py` has cut, so names, optimizers and tied
weights stay valid. Y = X A is column-parallel with A = [A_1, A_2], and row-parallel with X = [X_1, X_2] and
A = [A_1; A_2]. Shape legend: I input and O output features of the whole layer, i and o the features of this rank.

A caller sees what the whole model would take and return: hooks cut masks and biases that are given for all heads to
this rank's heads, and gather what a model of transformers returns for each layer (`attentions`, `hidden_states`).
Caches of keys and values stay divided, since only the model reads them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from deepspeed.errors import ConfigError, StateError
from deepspeed.ops.quantizer.packed import PackedWeight, packed_linear, unpack_weight
from deepspeed.parallel.model_part import whole_shape
from deepspeed.tensor_parallel.ranges import HeadShare
from deepspeed.tensor_parallel.ranks import (
    TensorRanks,
    gather_for_all,
    gather_last_dim,
    scatter_sum,
    sum_gradient,
    sum_over,
)


class HoldsPacked(Module):
    """A layer with weights that may be packed for inference. Packed weights move between devices with the layer.

    State dicts cannot hold packed weights, since the bytes are useless without their scales, so saving and loading them
    raises. Inside `widened`, state dicts hold the unpacked values.
    """

    #: by the name of the parameter that each replaces
    packed_weights: dict[str, PackedWeight]
    _widens_to: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self.packed_weights = {}

    def hold_packed(self, packed: dict[str, PackedWeight]) -> None:
        """Compute with these weights from now on. A parameter of that name becomes their bytes and keeps marks."""
        self.packed_weights = packed
        for name in packed:
            self._show(name)
        self.register_state_dict_pre_hook(_refuse_packed)
        self.register_load_state_dict_pre_hook(_refuse_packed)

    def bytes_of(self, name: str) -> Tensor:
        """Return the packed bytes, in the shape of the parameter."""
        return self.packed_weights[name].data

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the unpacked values of a weight, in the shape of the layer's weight; [out, in] here."""
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
        """Compute with `packed` from now on. A parameter `weight` becomes its bytes and keeps its marks."""
        self.hold_packed({"weight": packed})

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the unpacked values of the weight, [out, in], or [in, out] if `transposed`."""
        weight = super().numbers_of(name, dtype)
        return weight.t().contiguous() if self.transposed else weight


@contextmanager
def widened(module: Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside this context, state dicts of `module` hold packed weights unpacked to `dtype`, under the plain names."""
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
        weight: [o, I], or [I, o] if `transposed`, as in transformers' Conv1D.
        bias: [o].
        block: the name of the block that the layer begins, see [Note: a divided block] in `ranks.py`. "": none.
        gathered_sizes: output features of every rank, to gather the whole output. (): the output stays divided.
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
        self.reads_gathered = False  # True: the sequence is gathered before the block, which also sums the gradient
        self.out_features, self.in_features = _sizes(weight, transposed=transposed)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., o], or [..., O] with `gathered_sizes`."""
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
    """This rank's input features of a linear layer; sums the outputs over the ranks and ends a divided block.

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
        self.scatters_sequence = False  # True: the sequence is divided between blocks
        self.out_features, self.in_features = _sizes(weight, transposed=transposed)

    def forward(self, input: Tensor) -> Tensor:
        """[..., i] -> [..., O], equal on all ranks; [B, T, i] -> [B, T/W, O] if the sequence is divided."""
        self.ranks.leave()
        part = _product(self, input, None)
        scatters = self.scatters_sequence and self.ranks.sequence_is_divided
        total = scatter_sum(part, self.ranks) if scatters else sum_over(part, self.ranks)
        return total if self.bias is None else total + self.bias

    def extra_repr(self) -> str:
        return _shown(self, "row")


def _product(layer: ColumnParallelLinear | RowParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias with this rank's weight.

    Raises:
        ConfigError: the input is a part of the features, since the layer before is divided and this one's rule is not
            that of a layer that ends a divided block.
    """
    if x.shape[-1] != layer.in_features == x.shape[-1] * layer.ranks.world_size:
        raise ConfigError(
            f"tensor parallelism: found an input of {x.shape[-1]} features for a linear layer of {layer.in_features} "
            f"inputs, as the layer before it is divided over {layer.ranks.world_size} ranks; name this layer as one "
            "whose outputs are summed over the ranks, in injection_policy or partition_config"
        )
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


_MASKS = ("attention_mask", "mask", "position_bias", "head_mask", "layer_head_mask")
_ALIBI = ("alibi", "attention_mask")  # inputs of Bloom and Falcon
#: fields of transformers' outputs with one tensor per layer, [B, H, T, S] and [B, T, D]
_ATTENTIONS = ("attentions", "cross_attentions", "encoder_attentions", "decoder_attentions")
_HIDDEN = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def divide_per_head(
    model: Module, attention: Sequence[str], shares: Sequence[HeadShare], ranks: TensorRanks, *, has_alibi: bool
) -> None:
    """Register the hooks on a model with divided attention.

    Args:
        attention: paths of the attention modules.
        shares: the heads of each rank.
        has_alibi: inputs without a dim of their own for the heads, [B x H, ...], are cut as well.
    """
    whole = _WholeOutputs(shares, ranks)
    above = {""}
    for path in attention:
        cut = _Cut(model.get_submodule(path), shares[ranks.rank], has_alibi=has_alibi)
        model.get_submodule(path).register_forward_pre_hook(cut, with_kwargs=True)
        names = path.split(".")
        above |= {".".join(names[:length]) for length in range(1, len(names))}
    for path in sorted(above):
        module = model.get_submodule(path)
        if not path or "config" in vars(module):
            module.register_forward_hook(whole)


class _Cut:
    """A hook that cuts the inputs of an attention module to this rank's heads."""

    def __init__(self, module: Module, share: HeadShare, *, has_alibi: bool) -> None:
        self.share, self.has_alibi = share, has_alibi
        names = [name for name in inspect.signature(module.forward).parameters if name not in ("args", "kwargs")]
        self.places = {name: names.index(name) for name in {*_MASKS, "alibi"} if name in names}

    def __call__(self, _: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut = {name: self._own(name, kwargs[name]) for name in (*_MASKS, "alibi") if kwargs.get(name) is not None}
        at = {place: name for name, place in self.places.items() if place < len(args)}
        args = tuple(self._own(at[place], value) if place in at else value for place, value in enumerate(args))
        return args, {**kwargs, **cut}

    def _own(self, name: str, values: Any) -> Any:
        """[B, H, ...] or [B x H, ...] -> this rank's heads; a tensor without H heads is returned unchanged."""
        if not isinstance(values, Tensor):
            return values
        num_heads, own = self.share.num_heads, slice(*self.share.queries)
        if values.dim() == 4:
            return values[:, own] if values.shape[1] == num_heads else values
        if "head_mask" in name and values.shape == (num_heads,):
            return values[own]
        if self.has_alibi and name in _ALIBI:
            return values.unflatten(0, (-1, num_heads))[:, own].flatten(0, 1)
        return values


class _WholeOutputs:
    """A hook that gathers what a model returns for each layer, if it is asked for.

    The model is one of transformers: it returns a `ModelOutput`, or a tuple with a tuple of tensors in it.
    """

    def __init__(self, shares: Sequence[HeadShare], ranks: TensorRanks) -> None:
        self.ranks = ranks
        self.sizes = tuple(share.num_queries for share in shares)

    def __call__(self, _: Module, __: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Mapping):
            for name in (*_ATTENTIONS, *_HIDDEN):
                if isinstance(output.get(name), tuple):
                    output[name] = _of_each(output[name], self._heads if name in _ATTENTIONS else self._tokens)  # type: ignore[index]
            return None
        if type(output) is tuple and any(isinstance(value, tuple) for value in output):
            return tuple(_of_each(value, self._either) if isinstance(value, tuple) else value for value in output)
        return None

    def _either(self, values: Tensor) -> Tensor:
        return self._heads(values) if values.dim() == 4 else self._tokens(values)

    def _heads(self, values: Tensor) -> Tensor:
        """[B, this rank's heads, T, S] -> [B, H, T, S]; whole ones are returned unchanged, as an inner model's are."""
        if values.dim() != 4 or values.shape[1] != self.sizes[self.ranks.rank]:
            return values
        return gather_last_dim(values.transpose(1, -1), self.sizes, self.ranks).transpose(1, -1)

    def _tokens(self, values: Tensor) -> Tensor:
        """[B, T/W, D] -> [B, T, D] if the sequence is divided."""
        ranks = self.ranks
        if not ranks.sequence_is_divided or values.dim() != 3 or values.shape[1] * ranks.world_size != ranks.num_tokens:
            return values
        return gather_for_all(values, ranks)


def _of_each(values: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Return the tuple with `change` applied to its tensors, if it has no other values than tensors and None."""
    if all(value is None or isinstance(value, Tensor) for value in values):
        return tuple(None if value is None else change(value) for value in values)
    return values
