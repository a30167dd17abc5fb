"""Layers whose weight is stored in 8, 6 or 4 bits, in one parameter: `deepspeed.inference.quantization.layers`.

A layer becomes one of these in place (`store_layers`), so that the model, its hooks and whoever refers to the layer
keep it. Its `weight` is then one int8 tensor, 1-D, which ZeRO shards and gathers, `to` moves and a state dict saves
like any other; B bytes:

    header   8 x int32: a mark, whether there are values, bits, group size, group dim, kind, rows, columns;
             kind: 0 asymmetric, 1 symmetric, 2 floating
    scales   fp32, one per group
    zeros    fp32, one per group; none where symmetric
    data     the numbers, as `packed.py` has them; filled up to a multiple of 16 bytes

`packed.py` cuts groups along the last dimension, so with group dim 0 what is packed is the transposed weight. An
ordinary layer refuses such a weight for its shape. A stored one takes an ordinary weight from a state dict too, and
packs it: a layer made inside `zero.Init` or `QuantizationContext` has no values until then. The outputs are those of
`torch.nn.functional.linear` or `embedding` with the weight that `unpack_weight` gives.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from deepspeed._absent_members import absent_members
from deepspeed.config.inference import GroupWiseQuantConfig
from deepspeed.config.intake import parse_section
from deepspeed.errors import ConfigError, StateError
from deepspeed.ops.quantizer.packed import PackedWeight, check_bits, pack_weight, packed_linear, unit_of, unpack_weight

_MARK = 0x51775344  # "DSwQ"
_HEADER_BYTES = 32
_HAS_VALUES = 1  # its place in the header
_ALIGNMENT = 16  # bytes, so that the fp32 parts of weights that are gathered together are aligned


@dataclass(frozen=True)
class StoredForm:
    """How one weight is stored: see the file's docstring.

    Fields:
        shape: of the weight, in the order that its layer has.
        bits: 8 or 4; 8 or 6 where floating.
        group_size: elements that share a scale.
        group_dim: dimension along which a group lies.
        symmetric: whether groups have no minimum.
        floating: e4m3 or e3m2; symmetric.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    group_dim: int
    symmetric: bool
    floating: bool = False

    @classmethod
    def of(cls, shape: torch.Size, config: GroupWiseQuantConfig, key: str, where: str) -> "StoredForm":
        """The form that a configuration asks for.

        Raises:
            ConfigError: groups do not fit the weight; names the key, the layer and the sizes that fit.
        """
        try:
            check_bits(config.num_bits, config.floating)
        except ConfigError as error:
            raise ConfigError(f"{key}.num_bits: {error}") from None
        rows, cols = shape
        length, size = shape[config.group_dim], config.group_size
        step = unit_of(config.num_bits, config.floating)
        if length % size or size % step:
            even = {2: " and be even, as a byte holds two", 4: " and by 4, as three bytes hold four"}.get(step, "")
            fits = [each for each in range(step, length + 1, step) if length % each == 0]
            near = sorted(fits, key=lambda each: abs(math.log(each / size)))[:3]
            advice = f"for example {', '.join(map(str, sorted(near)))}" if near else "which no size does"
            raise ConfigError(
                f"{key}.group_size: found {size} for {where}, whose weight is {rows} x {cols}: with group_dim "
                f"{config.group_dim} it must divide {length}{even}; {advice}, or leave the layer out by a pattern of "
                "weight_quantization.post_init_quant"
            )
        symmetric = config.symmetric or config.floating
        return cls((rows, cols), config.num_bits, size, config.group_dim, symmetric, config.floating)

    @property
    def packed_shape(self) -> tuple[int, int]:
        """Of the matrix that is packed: groups lie along its rows."""
        return self.shape if self.group_dim == 1 else (self.shape[1], self.shape[0])

    @property
    def num_groups(self) -> int:
        """Of the weight."""
        return self.shape[0] * self.shape[1] // self.group_size

    @property
    def num_bytes(self) -> int:
        """Elements of the stored weight."""
        rows, cols = self.shape
        data = rows * cols * self.bits // 8
        numel = _HEADER_BYTES + 4 * self.num_groups * (1 if self.symmetric else 2) + data
        return -(-numel // _ALIGNMENT) * _ALIGNMENT

    def empty(self, device: torch.device) -> Tensor:
        """A stored weight that has no values yet."""
        stored_B = torch.zeros(self.num_bytes, dtype=torch.int8, device=device)
        self._write_header(stored_B, has_values=False)
        return stored_B

    @torch.no_grad()
    def pack(self, weight: Tensor) -> Tensor:
        """The stored form of a weight."""
        matrix = weight.detach() if self.group_dim == 1 else weight.detach().t().contiguous()
        packed = pack_weight(matrix.contiguous(), self.bits, self.group_size, self.symmetric, floating=self.floating)
        stored_B = self.empty(weight.device)
        self._write_header(stored_B, has_values=True)
        view = self.view(stored_B)
        view.data.copy_(packed.data)
        view.scales.copy_(packed.scales)
        if view.zeros is not None and packed.zeros is not None:
            view.zeros.copy_(packed.zeros)
        return stored_B

    def view(self, stored_B: Tensor) -> PackedWeight:
        """The parts of a stored weight, without a copy."""
        rows, cols = self.packed_shape
        of_groups = (rows, cols // self.group_size)
        if stored_B.storage_offset() % 4:  # gathered with parameters of another size
            stored_B = stored_B.clone()
        ends = [_HEADER_BYTES + 4 * self.num_groups * count for count in range(3)]
        scales = stored_B[ends[0] : ends[1]].view(torch.float32).view(of_groups)
        zeros = None if self.symmetric else stored_B[ends[1] : ends[2]].view(torch.float32).view(of_groups)
        start = ends[1] if self.symmetric else ends[2]
        data = stored_B[start : start + rows * cols * self.bits // 8].view(rows, cols * self.bits // 8)
        return PackedWeight(data, scales, zeros, self.bits, self.group_size, (rows, cols), self.floating)

    def unpack(self, stored_B: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight, in the order of its layer."""
        weight = unpack_weight(self.view(stored_B), dtype)
        return weight if self.group_dim == 1 else weight.t()

    def difference(self, stored_B: Tensor) -> str:
        """What of a stored weight is not of this form; "": nothing."""
        header = stored_B.detach()[:_HEADER_BYTES].cpu().clone().view(torch.int32).tolist()
        if stored_B.numel() < _HEADER_BYTES or header[0] != _MARK:
            return "it is no weight that deepspeed.inference.quantization stored"
        names = ("num_bits", "group_size", "group_dim", "kind", "rows", "columns")
        wanted = self._header(has_values=True)[2:]
        differ = [
            f"{name} {found} instead of {asked}"
            for name, found, asked in zip(names, header[2:], wanted, strict=True)
            if found != asked
        ]
        return ", ".join(differ)

    def has_values(self, stored_B: Tensor) -> bool:
        """Whether a checkpoint gave it any. Waits for the device."""
        return bool(stored_B.detach()[:_HEADER_BYTES].cpu().clone().view(torch.int32)[_HAS_VALUES].item())

    def _header(self, has_values: bool) -> list[int]:
        kind = 2 if self.floating else int(self.symmetric)
        return [_MARK, int(has_values), self.bits, self.group_size, self.group_dim, kind, *self.shape]

    def _write_header(self, stored_B: Tensor, has_values: bool) -> None:
        header = torch.tensor(self._header(has_values), dtype=torch.int32).view(torch.int8)
        stored_B[:_HEADER_BYTES].copy_(header)


class StoredLayer(nn.Module):
    """What the layers have in common. Made from an ordinary layer by `store_layers` or `await_values`."""

    weight: Tensor
    form: StoredForm
    #: type of the weight that was stored
    dtype: torch.dtype
    _has_values: bool
    _device: torch.device | None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor):
            value = self._stored(value)
        super().__setattr__(name, value)

    def _stored(self, value: Tensor) -> Parameter:
        """A weight that is assigned, as transformers does when it loads and ties: in the form of this layer."""
        if value.dtype is torch.int8:
            if value.device.type != "meta" and value.numel() and (text := self.form.difference(value)):
                raise ConfigError(f"weight: found a weight stored otherwise, {text}; tied layers must be stored alike")
            self._has_values = False  # as far as is known
            return value if isinstance(value, Parameter) else Parameter(value, requires_grad=False)
        if tuple(value.shape) != self.form.shape or not value.is_floating_point():
            raise ConfigError(
                f"weight: found {value.dtype} of shape {tuple(value.shape)} for a weight of shape {self.form.shape}"
            )
        if value.device.type == "meta":
            return Parameter(value.detach(), requires_grad=False)
        self.dtype = value.dtype
        device = value.device if self._device is None else self._device
        stored = Parameter(self.form.pack(value.detach().to(device)), requires_grad=False)
        stored._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers would draw random numbers into it
        self._has_values = True
        return stored

    def _packed(self) -> PackedWeight:
        """The parts of the weight, for the forward."""
        if not self._has_values:
            if self.weight.dtype is not torch.int8 or (self.weight.numel() and not self.form.has_values(self.weight)):
                raise StateError(
                    f"{type(self).__name__}: found no weight of shape {self.form.shape}: it was made with "
                    "quantized_initialization, so its values are those of a checkpoint; load one, or make the model "
                    "without it and use weight_quantization.post_init_quant"
                )
            if not self.weight.numel():
                raise StateError(
                    f"{type(self).__name__}: found a weight of shape {self.form.shape} that is sharded and not "
                    "gathered; call the engine of deepspeed.initialize, or gather it with GatheredParameters"
                )
            self._has_values = True
        return self.form.view(self.weight)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight that the layer computes with, in `dtype`; default: the type that it had."""
        self._packed()
        return self.values(dtype=dtype)

    def values(self, stored_B: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers that a stored weight stands for: this layer's, or `stored_B`, gathered."""
        return self.form.unpack(self.weight if stored_B is None else stored_B, dtype or self.dtype).contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredLayer":
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take an ordinary weight, which is packed, or a stored one."""
        name = f"{prefix}weight"
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        refusal = ""
        if name in own:
            own[name], refusal = self._loaded(own[name])
        if refusal:
            del own[name]
            error_msgs.append(f"{name}: {refusal}")
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if refusal and name in missing_keys:
            missing_keys.remove(name)
        elif name in own:
            self._has_values = True

    def _loaded(self, value: Tensor) -> tuple[Tensor, str]:
        """The stored form of a weight from a state dict, or why there is none."""
        if value.device.type == "meta":
            return value, "found a tensor of the meta device, which has no values"
        if value.dtype is torch.int8:
            text = self.form.difference(value)
            refusal = f"found a weight stored otherwise: {text}; give the settings with which it was saved"
            stored = value
        else:
            is_weight = tuple(value.shape) == self.form.shape and value.is_floating_point()
            text = "" if is_weight else "other"
            refusal = (
                f"found {value.dtype} of shape {tuple(value.shape)}, and the weight has the shape {self.form.shape}"
            )
            stored = self.form.pack(value.to(self.dtype)) if is_weight else value
        if text:
            return value, refusal
        if self.weight.dtype is not torch.int8:
            device = value.device if self._device is None else self._device
            self.weight = Parameter(self.form.empty(device), requires_grad=False)
        return stored, ""

    def extra_repr(self) -> str:
        form = self.form
        kind = "floating" if form.floating else "symmetric" if form.symmetric else "asymmetric"
        return f"{form.shape[0]} x {form.shape[1]}, {form.bits} bits, {kind}, groups of {form.group_size}"


def _as_section(config: Any) -> GroupWiseQuantConfig:
    return config if isinstance(config, GroupWiseQuantConfig) else parse_section(GroupWiseQuantConfig, config)


@absent_members("inference.quantization.layers:QuantizedLinear")
class QuantizedLinear(StoredLayer, nn.Linear):
    """A linear layer whose weight is stored in few bits; its bias keeps its type.

    Args:
        config: keys `num_bits`, `group_size`, `group_dim`, `symmetric`.
        pre_quant_layer: the layer whose weight is stored; stays as it is.
    """

    _is_transposed = False  # the weight is [in, out]

    def __init__(self, config: Any, pre_quant_layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        _take_over(self, pre_quant_layer, _as_section(config))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], of the input's dtype."""
        packed = self._packed()
        if (self.form.group_dim == 1) != self._is_transposed:
            return packed_linear(input, packed, self.bias)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, unpack_weight(packed, input.dtype).t(), bias)


class QuantizedConv1D(QuantizedLinear):
    """The same for the linear layer of transformers whose weight is [in, out]."""

    _is_transposed = True


@absent_members("inference.quantization.layers:QuantizedEmbedding")
class QuantizedEmbedding(StoredLayer, nn.Embedding):
    """An embedding whose weight is stored in few bits; rows are unpacked as they are looked up.

    Args:
        config, pre_quant_layer: as for `QuantizedLinear`.
    """

    def __init__(self, config: Any, pre_quant_layer: nn.Embedding) -> None:
        nn.Module.__init__(self)
        _take_over(self, pre_quant_layer, _as_section(config))

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the weight, of the type that the weight had."""
        packed = self._packed()
        if self.form.group_dim == 0:
            return F.embedding(input, unpack_weight(packed, self.dtype).t())
        rows = input.reshape(-1)
        if not rows.numel():
            return torch.empty((*input.shape, self.form.shape[1]), dtype=self.dtype, device=input.device)
        zeros = None if packed.zeros is None else packed.zeros[rows]
        shape = (rows.numel(), packed.shape[1])
        found = replace(packed, data=packed.data[rows], scales=packed.scales[rows], zeros=zeros, shape=shape)
        return unpack_weight(found, self.dtype).view(*input.shape, shape[1])


#: class of a layer -> of the layer that it becomes; by name, since core does not need transformers
_STORED: dict[str, type[StoredLayer]] = {
    "torch.nn.modules.linear.Linear": QuantizedLinear,
    "torch.nn.modules.sparse.Embedding": QuantizedEmbedding,
    "transformers.pytorch_utils.Conv1D": QuantizedConv1D,
}


def can_be_stored(module: nn.Module) -> bool:
    """Whether it is a linear or embedding layer with a weight of its own, and not of a class derived from one."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}" in _STORED and module._parameters.get("weight") is not None


def store_layers(layers: Iterable[tuple[str, nn.Module, GroupWiseQuantConfig, str]]) -> None:
    """Store the weights of layers, in place; one whole weight is in memory beside them. Tied ones stay tied.

    Args:
        layers: (name, layer, how its weight is stored, key of the configuration that says so).

    Raises:
        ConfigError: groups do not fit, or a weight has no values. Layers before it are stored.
    """
    done: dict[tuple[Tensor, StoredForm], Tensor] = {}
    for name, layer, config, key in layers:
        weight = layer._parameters["weight"]
        assert weight is not None
        if weight.device.type == "meta":
            raise ConfigError(
                f"{key}: found {name} on the meta device, where it has no values; load the model before, or make it "
                "inside QuantizationContext with weight_quantization.quantized_initialization"
            )
        stored = take_form(layer, config, weight.shape, weight.dtype, key, name)
        same = done.get((weight, stored.form))
        stored.weight = weight if same is None else same
        done[weight, stored.form] = stored.weight
        stored._has_values = True


def take_form(
    layer: nn.Module, config: GroupWiseQuantConfig, shape: torch.Size, dtype: torch.dtype, key: str, name: str
) -> StoredLayer:
    """Make an ordinary layer a stored one; its weight is as it was, and must be replaced at once."""
    form = StoredForm.of(shape, config, key, name)
    if getattr(layer, "max_norm", None) is not None:
        raise ConfigError(
            f"{key}: found {name} with max_norm, by which an embedding changes its weight as it looks rows up; leave "
            "it out by a pattern of weight_quantization.post_init_quant"
        )
    cls = type(layer)
    layer.__class__ = _STORED[f"{cls.__module__}.{cls.__qualname__}"]
    assert isinstance(layer, StoredLayer)
    vars(layer).update(form=form, dtype=dtype, _has_values=False, _device=None)
    return layer


def await_values(layer: nn.Module, config: GroupWiseQuantConfig, key: str, *, allocates: bool) -> StoredLayer:
    """Make a layer that was just built a stored one, without values until a checkpoint is loaded.

    Args:
        allocates: the stored weight exists, to be sharded; else it is made when the values come.
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    stored = take_form(layer, config, weight.shape, weight.dtype, key, f"a {type(layer).__name__}")
    if allocates:
        stored.weight = Parameter(stored.form.empty(weight.device), requires_grad=False)
    else:
        stored._device = None if weight.device.type == "meta" else weight.device
        stored.weight = Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    return stored


def _take_over(into: StoredLayer, layer: nn.Module, config: GroupWiseQuantConfig) -> None:
    """Give a new stored layer what an ordinary one has, and the stored form of its weight."""
    weight = layer._parameters["weight"]
    assert weight is not None
    copied = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    form = StoredForm.of(weight.shape, config, "config", f"a {type(layer).__name__}")
    vars(into).update(copied, form=form, dtype=weight.dtype, _has_values=False, _device=None)
    into.weight = weight
