"""Layers with the weight quantized to 8, 6 or 4 bits in one parameter: `deepspeed.inference.quantization.layers`.

`store_layers` converts a layer in place, so the model, its hooks and all references keep the same object. Its `weight`
is then a 1-D int8 tensor in the format of `stored_form.py`. ZeRO shards and gathers it, `to` moves it and a state dict
saves it like any other parameter. Experts (`ops.experts`) have two such parameters; each holds all experts.

An ordinary layer rejects a stored weight because of its shape. A stored layer also loads an ordinary weight from a
state dict, and packs it: a layer created inside `zero.Init` or `QuantizationContext` has no values until then. The
outputs are equal to `torch.nn.functional.linear` or `embedding` with the weight from `unpack_weight`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from deepspeed._absent import absent_members
from deepspeed.config.inference import GroupWiseQuantConfig
from deepspeed.config.intake import parse_section
from deepspeed.errors import ConfigError, StateError
from deepspeed.ops.experts import (
    ConvertedExperts,
    converted_class,
    is_experts,
    is_transposed,
    names_of_weights,
    run_experts,
)
from deepspeed.ops.quantizer.packed import PackedWeight, packed_grouped_linear, packed_linear, unpack_weight
from deepspeed.ops.quantizer.stored_form import StoredForm


class StoredLayer(nn.Module):
    """The base class of the stored layers. `store_layers` and `await_values` convert ordinary layers to them."""

    weight: Tensor
    #: name of the parameter -> its form
    forms: dict[str, StoredForm]
    #: dtype of the original weight
    dtype: torch.dtype
    _have_values: set[str]  # names of parameters that are known to have values
    _device: torch.device | None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and name in vars(self).get("forms", ()):
            value = self._stored(name, value)
        super().__setattr__(name, value)

    def _weight(self, name: str) -> Tensor:
        found: Tensor = getattr(self, name)
        return found

    def begin_storing(self, dtype: torch.dtype) -> None:
        """Initialize the attributes of a layer that was an ordinary one. No weight is stored yet."""
        vars(self).update(forms={}, dtype=dtype, _have_values=set(), _device=None)

    @property
    def form(self) -> StoredForm:
        """The form of the weight of a linear layer or embedding."""
        return self.forms["weight"]

    def _stored(self, name: str, value: Tensor) -> Parameter:
        """Convert an assigned weight to the stored form. transformers assigns weights when it loads and ties them."""
        form = self.forms[name]
        if value.dtype is torch.int8:
            if value.device.type != "meta" and value.numel() and (text := form.difference(value)):
                raise ConfigError(f"{name}: found a weight stored otherwise, {text}; tied layers must be stored alike")
            self._have_values.discard(name)
            return value if isinstance(value, Parameter) else Parameter(value, requires_grad=False)
        if tuple(value.shape) != form.whole_shape or not value.is_floating_point():
            raise ConfigError(
                f"{name}: found {value.dtype} of shape {tuple(value.shape)} for a weight of shape {form.whole_shape}"
            )
        if value.device.type == "meta":
            return Parameter(value.detach(), requires_grad=False)
        self.dtype = value.dtype
        device = value.device if self._device is None else self._device
        stored = Parameter(form.pack(value.detach().to(device)), requires_grad=False)
        stored._is_hf_initialized = True  # type: ignore[attr-defined]  # else transformers initializes it randomly
        self._have_values.add(name)
        return stored

    def _packed(self, name: str = "weight") -> PackedWeight:
        """Return the parts of a weight for the forward. Raises StateError if the weight has no values."""
        form, weight = self.forms[name], self._weight(name)
        if name not in self._have_values:
            if weight.dtype is not torch.int8 or (weight.numel() and not form.has_values(weight)):
                raise StateError(
                    f"{type(self).__name__}: found no {name} of shape {form.whole_shape}: it was made with "
                    "quantized_initialization, so its values are those of a checkpoint; load one, or make the model "
                    "without it and use weight_quantization.post_init_quant"
                )
            if not weight.numel():
                raise StateError(
                    f"{type(self).__name__}: found a {name} of shape {form.whole_shape} that is sharded and not "
                    "gathered; call the engine of deepspeed.initialize, or gather it with GatheredParameters"
                )
            self._have_values.add(name)
        return form.view(weight)

    def dequantized(self, dtype: torch.dtype | None = None, name: str = "weight") -> Tensor:
        """Return the weight that the layer computes with, in `dtype` (default: the original dtype)."""
        self._packed(name)
        return self.values(dtype=dtype, name=name)

    def values(self, stored_B: Tensor | None = None, dtype: torch.dtype | None = None, name: str = "weight") -> Tensor:
        """Unpack a stored weight: this layer's weight, or `stored_B` (gathered)."""
        stored_B = self._weight(name) if stored_B is None else stored_B
        return self.forms[name].unpack(stored_B, dtype or self.dtype).contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredLayer":
        super()._apply(fn, recurse)
        device = self._weight(next(iter(self.forms))).device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
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
        """Load ordinary weights, which are packed here, or stored weights."""
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        refused = set()
        for name in self.forms:
            key = f"{prefix}{name}"
            if key not in own:
                continue
            own[key], refusal = self._loaded(name, own[key])
            if refusal:
                del own[key]
                refused.add(key)
                error_msgs.append(f"{key}: {refusal}")
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [key for key in missing_keys if key not in refused]
        self._have_values.update(name for name in self.forms if f"{prefix}{name}" in own)

    def _loaded(self, name: str, value: Tensor) -> tuple[Tensor, str]:
        """Return (stored weight, ""), or (value, reason) if a weight from a state dict cannot be loaded."""
        form = self.forms[name]
        if value.device.type == "meta":
            return value, "found a tensor of the meta device, which has no values"
        if value.dtype is torch.int8:
            text = form.difference(value)
            refusal = f"found a weight stored otherwise: {text}; give the settings with which it was saved"
            stored = value
        else:
            is_weight = tuple(value.shape) == form.whole_shape and value.is_floating_point()
            text = "" if is_weight else "other"
            found = f"found {value.dtype} of shape {tuple(value.shape)}"
            refusal = f"{found}, and the weight has the shape {form.whole_shape}"
            stored = form.pack(value.to(self.dtype)) if is_weight else value
        if text:
            return value, refusal
        if self._weight(name).dtype is not torch.int8:
            device = value.device if self._device is None else self._device
            setattr(self, name, Parameter(form.empty(device), requires_grad=False))
        return stored, ""

    def extra_repr(self) -> str:
        def shown(name: str, form: StoredForm) -> str:
            kind = "floating" if form.floating else "symmetric" if form.symmetric else "asymmetric"
            size = f"{'' if name == 'weight' else f'{name}: '}{' x '.join(map(str, form.whole_shape))}"
            return f"{size}, {form.bits} bits, {kind}, groups of {form.group_size}"

        return "; ".join(shown(*each) for each in self.forms.items())


def _as_section(config: Any) -> GroupWiseQuantConfig:
    return config if isinstance(config, GroupWiseQuantConfig) else parse_section(GroupWiseQuantConfig, config)


@absent_members("inference.quantization.layers:QuantizedLinear")
class QuantizedLinear(StoredLayer, nn.Linear):
    """A linear layer with a quantized weight. The bias keeps its dtype.

    Args:
        config: keys `num_bits`, `group_size`, `group_dim`, `symmetric`.
        pre_quant_layer: the layer with the original weight; it does not change.
    """

    _is_transposed = False  # the weight is [in, out]

    def __init__(self, config: Any, pre_quant_layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        _take_over(self, pre_quant_layer, _as_section(config))

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., in] -> [..., out] in the input's dtype."""
        packed = self._packed()
        if (self.form.group_dim == 1) != self._is_transposed:
            return packed_linear(input, packed, self.bias)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, unpack_weight(packed, input.dtype).t(), bias)


class QuantizedConv1D(QuantizedLinear):
    """A quantized `Conv1D` of transformers: a linear layer with a weight of shape [in, out]."""

    _is_transposed = True


@absent_members("inference.quantization.layers:QuantizedEmbedding")
class QuantizedEmbedding(StoredLayer, nn.Embedding):
    """An embedding with a quantized weight. Rows are unpacked when they are looked up.

    Args:
        config, pre_quant_layer: see `QuantizedLinear`.
    """

    def __init__(self, config: Any, pre_quant_layer: nn.Embedding) -> None:
        nn.Module.__init__(self)
        _take_over(self, pre_quant_layer, _as_section(config))

    def forward(self, input: Tensor) -> Tensor:
        """Return rows of the weight, in the original dtype."""
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


class StoredExperts(ConvertedExperts, StoredLayer):
    """Experts with one or both weights quantized. Biases keep their dtype. `store_layers` creates them."""

    prefix = "Quantized"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute [..., H] -> [..., H]; index and weights are [T, K]."""
        return run_experts(self, self.product, self.num_held, hidden_states, top_k_index, top_k_weights)

    @property
    def num_held(self) -> int:
        """The number of experts whose weights this module holds."""
        return next(iter(self.forms.values())).experts

    def product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """Multiply the first `counts[0]` rows by the first expert's weight, and so on."""
        bias = getattr(self, f"{name}_bias", None)
        form = self.forms.get(name)
        if form is not None and (form.group_dim == 1) != is_transposed(self):
            return packed_grouped_linear(rows, self._packed(name), counts, bias)
        outputs = []
        for number, some in enumerate(rows.split(list(counts))):
            if len(some):
                weight = self._of_expert(name, number, rows.dtype)
                its_bias = None if bias is None else bias[number].to(rows.dtype)
                outputs.append(F.linear(some, weight.t() if is_transposed(self) else weight, its_bias))
        if outputs:
            return torch.cat(outputs)
        shape = self._weight(name).shape if form is None else form.whole_shape
        return rows.new_empty(0, shape[2 if is_transposed(self) else 1])

    def _of_expert(self, name: str, number: int, dtype: torch.dtype) -> Tensor:
        """Return the weight of one expert in the original orientation."""
        if name not in self.forms:
            return self._weight(name)[number]
        packed = self._packed(name)
        length = packed.shape[0] // self.num_held
        weight = unpack_weight(packed.narrow(0, number * length, length), dtype)
        return weight if self.forms[name].group_dim == 1 else weight.t()


#: name of a layer's class -> class of the stored layer; names, because core does not require transformers
_STORED: dict[str, type[StoredLayer]] = {
    "torch.nn.modules.linear.Linear": QuantizedLinear,
    "torch.nn.modules.sparse.Embedding": QuantizedEmbedding,
    "transformers.pytorch_utils.Conv1D": QuantizedConv1D,
}


def weights_to_store(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of a module that can be stored.

    Linear and embedding layers have one, unless their class is a subclass or the weight is missing; experts have two.
    """
    if isinstance(module, StoredLayer):
        return ()
    cls = type(module)
    if f"{cls.__module__}.{cls.__qualname__}" in _STORED:
        return ("weight",) if module._parameters.get("weight") is not None else ()
    return names_of_weights(module) if is_experts(module) else ()


class WeightToStore(NamedTuple):
    """A weight to store, its settings, and the configuration key of the settings."""

    name: str  # for messages
    layer: nn.Module
    weight_name: str
    config: GroupWiseQuantConfig
    key: str


def store_layers(weights: Iterable[WeightToStore]) -> None:
    """Quantize weights of layers in place, one at a time to limit memory. Tied weights stay tied.

    Raises:
        ConfigError: groups do not fit, or a weight has no values. The layers before it are already stored.
    """
    done: dict[tuple[Tensor, StoredForm], Tensor] = {}
    for each in weights:
        weight = each.layer._parameters[each.weight_name]
        assert weight is not None
        if weight.device.type == "meta":
            raise ConfigError(
                f"{each.key}: found {each.name} on the meta device, where it has no values; load the model before, or "
                "make it inside QuantizationContext with weight_quantization.quantized_initialization"
            )
        stored = take_form(each, weight.shape, weight.dtype)
        form = stored.forms[each.weight_name]
        same = done.get((weight, form))
        setattr(stored, each.weight_name, weight if same is None else same)
        done[weight, form] = stored.get_parameter(each.weight_name)
        stored._have_values.add(each.weight_name)


def take_form(each: WeightToStore, shape: torch.Size, dtype: torch.dtype) -> StoredLayer:
    """Convert an ordinary layer to a stored layer. The caller must replace its weight immediately."""
    layer = each.layer
    form = StoredForm.of(shape, each.config, each.key, each.name)
    if getattr(layer, "max_norm", None) is not None:
        raise ConfigError(
            f"{each.key}: found {each.name} with max_norm, by which an embedding changes its weight as it looks rows "
            "up; leave it out by a pattern of weight_quantization.post_init_quant"
        )
    if not isinstance(layer, StoredLayer):
        cls = type(layer)
        found = _STORED.get(f"{cls.__module__}.{cls.__qualname__}")
        layer.__class__ = converted_class(StoredExperts, cls) if found is None else found
        assert isinstance(layer, StoredLayer)
        layer.begin_storing(dtype)
    layer.forms[each.weight_name] = form
    return layer


def await_values(layer: nn.Module, config: GroupWiseQuantConfig, key: str, *, allocates: bool) -> StoredLayer:
    """Convert a new layer to a stored layer without values. A checkpoint provides the values later.

    Args:
        allocates: allocate the stored weights now, so that they can be sharded; else when the values are loaded.
    """
    for name in weights_to_store(layer):
        weight = layer._parameters[name]
        assert weight is not None
        shown = f"a {type(layer).__name__}" if name == "weight" else f"{name} of a {type(layer).__name__}"
        stored = take_form(WeightToStore(shown, layer, name, config, key), weight.shape, weight.dtype)
        if allocates:
            setattr(stored, name, Parameter(stored.forms[name].empty(weight.device), requires_grad=False))
        else:
            stored._device = None if weight.device.type == "meta" else weight.device
            setattr(stored, name, Parameter(torch.empty_like(weight, device="meta"), requires_grad=False))
    assert isinstance(layer, StoredLayer)
    return layer


def _take_over(into: StoredLayer, layer: nn.Module, config: GroupWiseQuantConfig) -> None:
    """Copy the attributes of an ordinary layer to a new stored layer, and store its weight."""
    weight = layer._parameters["weight"]
    assert weight is not None
    copied = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    vars(into).update(copied)
    into.begin_storing(weight.dtype)
    into.forms["weight"] = StoredForm.of(weight.shape, config, "config", f"a {type(layer).__name__}")
    into.weight = weight
