"""Weights of linear layers and experts in few bits: `init_inference(model, dtype=torch.int8)`, also "fp8" and "fp6".

Each linear layer gets a packed weight (`ops/quantizer/packed.py`), the output layer only where its bits are asked for,
and so does each expert (`packed_experts.py`); biases, norms, routers and embeddings keep their type, in which the model
goes on computing. For outputs y = x W^T of one layer

    |y_o - y'_o| <= sum_i |x_i| scale_o,i / 2,    scale = max|W| / (2^(bits - 1) - 1) of the group of W_o,i

where symmetric, plus the rounding of the type: what `pack_weight` rounds, times what it is multiplied with. With an
exponent, e4m3 (r = 2^-4, a = 2^-10) or e3m2 (r = 2^-3, a = 2^-5),

    |y_o - y'_o| <= sum_i |x_i| max(r |W_o,i|, a scale_o,i),    scale = max|W| / 448, or max|W| / 28
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.config.inference import DeepSpeedInferenceConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.inference.packed_experts import pack_experts
from deepspeed.log import announce
from deepspeed.ops.experts import is_experts, names_of_weights
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.ops.quantizer.packed import PackedWeight, check_bits, pack_rows, packed_linear
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, MayBePacked, RowParallelLinear

# beside torch.nn.Linear, of transformers: the same product
_LINEARS = ("Conv1D", "FalconLinear")
# path of a layer -> groups of its weight, at least
GroupsOf = Callable[[str], int]


class PackedLinear(MayBePacked):
    """A linear layer with a packed weight, for inference.

    Args:
        packed: [out, in].
        bias: [out].
        transposed: the weight of the layer that it stands for was [in, out].
    """

    bias: nn.Parameter | None

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        self.pack(packed)
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = packed.shape

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The packed bytes: models look at the dtype of a layer's weight."""
        return self.packed_weights["weight"].data

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], of x's dtype."""
        return packed_linear(x, self.packed_weights["weight"], self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.packed_weights['weight'].form}"


def layer_groups(settings: DeepSpeedInferenceConfig) -> GroupsOf | None:
    """How many groups a layer's weight has at least; None: weights are not quantized.

    Raises:
        ConfigError: `quantization_setting` has another form, or is given without a dtype that packs.
    """
    setting = settings.quantization_setting
    if not settings.packs:
        if setting is not None or settings.quant.model_fields_set - {"enabled"}:
            name = "quantization_setting" if setting is not None else "quant"
            found = setting or settings.quant.model_dump(exclude_unset=True)
            raise ConfigError(
                f"{name}: found {found!r} with dtype {settings.dtype!r}; weights are quantized with dtype int8, fp8 "
                "and fp6"
            )
        return None
    _bits(settings, is_head=False)
    _bits(settings, is_head=True)
    if _input_bits(settings) == 8 and settings.dtype != "int8":
        raise ConfigError(
            f"quant.activation: found num_bits 8 with dtype {settings.dtype!r}, whose weights are widened; leave it "
            "out, or give dtype int8"
        )
    if setting is None:
        return lambda path: settings.quant.weight.q_groups
    pair = setting if isinstance(setting, tuple | list) else (False, setting)
    if len(pair) != 2 or isinstance(pair[1], bool) or not isinstance(pair[1], int) or pair[1] < 1:
        raise ConfigError(
            f"quantization_setting: found {setting!r}; give the number of groups, or (True, groups) for twice as many "
            "in feed-forward layers"
        )
    more_for_mlp, groups = pair
    return lambda path: groups * (2 if more_for_mlp and "mlp" in path.lower() else 1)


def _bits(settings: DeepSpeedInferenceConfig, is_head: bool) -> int | None:
    """Of a layer's weight, or of the output layer's; None: it is not packed."""
    config, dtype = settings.quant.weight, settings.dtype
    floating = dtype != "int8"
    bits = config.num_bits if not floating else int(dtype.removeprefix("fp"))
    if floating and "num_bits" in config.model_fields_set and config.num_bits != bits:
        raise ConfigError(
            f"quant.weight.num_bits: found {config.num_bits} with dtype {dtype!r}; leave it out, or give dtype int8"
        )
    if floating and config.q_type != "symmetric":
        raise ConfigError(
            f"quant.weight.q_type: found {config.q_type!r} with dtype {dtype!r}, whose numbers are around 0; leave it "
            "out, or give dtype int8"
        )
    if is_head and config.output_num_bits is not None:
        try:
            check_bits(config.output_num_bits, floating)
        except ConfigError as error:
            raise ConfigError(f"quant.weight.output_num_bits: with dtype {dtype!r}: {error}") from None
    return config.output_num_bits if is_head else bits


def _input_bits(settings: DeepSpeedInferenceConfig) -> int:
    """To which kernels may round what a weight is multiplied with."""
    config = settings.quant.activation
    return 16 if config is None or not config.enabled else config.num_bits


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating-point type that most of the model's parameters have."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=counts.__getitem__) if counts else torch.get_default_dtype()


@dataclass
class _Weight:
    """One that is packed; as the module has it, [out, in], or [in, out] where transposed; of experts [E, ...]."""

    module: nn.Module
    name: str
    path: str
    bits: int
    group_size: int
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), or (E out, in), as it is packed."""
        rows, cols = self.tensor.shape[-2:][:: -1 if self.is_transposed else 1]
        return self.tensor.shape[:-2].numel() * rows, cols

    @property
    def tensor(self) -> Tensor:
        """As it is now."""
        found: Tensor = getattr(self.module, self.name)
        return found


class Packing:
    """The weights of a model's linear layers and experts that get packed, and how.

    Made where the model is divided; its values may come later (`take`). One whole weight at a time, and of a file one
    expert, is in memory beside the packed ones.

    Raises:
        ConfigError: a number of groups does not fit a weight; names the layer, and the sizes that fit.
    """

    def __init__(self, model: nn.Module, groups_of: GroupsOf, settings: DeepSpeedInferenceConfig) -> None:
        self._model, self._settings = model, settings
        get_head: Any = getattr(model, "get_output_embeddings", None)
        head = get_head() if get_head is not None else None
        self._left: dict[str, str] = {}
        self._modules: list[tuple[str, nn.Module, list[_Weight]]] = []
        self._taken: dict[int, PackedWeight] = {}
        for path, module in model.named_modules():
            bits = _bits(settings, module is head)
            names = () if bits is None else self._names(module, path)
            weights = [self._planned(path, module, name, groups_of(path), bits or 0) for name in names]
            if weights:
                self._modules.append((path, module, weights))
        users = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        planned = {id(each.tensor): each for _, _, weights in self._modules for each in weights}
        self._by_param = {key: each for key, each in planned.items() if users[key] == 1}

    def _names(self, module: nn.Module, path: str) -> tuple[str, ...]:
        """Of the weights of this module that are packed."""
        if is_experts(module) and not isinstance(module, StoredLayer):
            return names_of_weights(module)
        if "Experts" in type(module).__name__ and any(each.dim() == 3 for each in module.parameters(recurse=False)):
            self._left.setdefault(type(module).__name__, path)
        is_divided = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        is_linear = is_divided or type(module) is nn.Linear or type(module).__name__ in _LINEARS
        return ("weight",) if is_linear else ()

    def _planned(self, path: str, module: nn.Module, name: str, num_groups: int, bits: int) -> _Weight:
        is_of_linear = name == "weight"
        named = path if is_of_linear else f"{path}.{name}"
        keys = ("transposed",) if is_of_linear else ("is_transposed",)
        is_transposed = type(module).__name__ == "Conv1D" or any(getattr(module, key, False) for key in keys)
        weight = _Weight(module, name, named, bits, 0, is_transposed)
        rows, cols = weight.tensor.shape[-2:][:: -1 if is_transposed else 1]
        per_row = -(-num_groups // rows)
        if cols % per_row:
            raise ConfigError(
                f"quant.weight.q_groups: found {counted(num_groups, 'group')} for {named}, whose weight is {rows} x "
                f"{cols}: {per_row} per row do not divide {cols}; give a multiple of {rows} times a divisor of {cols}, "
                "or 1"
            )
        return replace(weight, group_size=cols // per_row)

    def takes(self, param: Tensor) -> bool:
        """Whether the values of a parameter are for `take`; one that has other uses keeps its own."""
        return id(param) in self._by_param

    def take(self, param: Tensor, parts: Iterable[Tensor]) -> None:
        """Pack the values of a parameter, which it does not get itself: parts along its first dimension, in order."""
        self._taken[id(param)] = self._packed(self._by_param[id(param)], parts)

    @torch.no_grad()
    def apply(self) -> None:
        """Let the modules compute with packed weights, in place: those that were taken, and those that they have."""
        self._by_param.clear()
        while self._modules:  # which hold the weights until each is packed
            path, module, weights = self._modules.pop(0)
            packed = {}
            for each in weights:
                taken = self._taken.pop(id(each.tensor), None)
                packed[each.name] = self._packed(each, [each.tensor.detach()]) if taken is None else taken
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.pack(packed["weight"])
            elif "weight" in packed:
                bias: Any = module.bias
                self._model.set_submodule(path, PackedLinear(packed["weight"], bias, weights[0].is_transposed))
            else:
                pack_experts(module, packed)
        for name, path in self._left.items():
            kept = "keep their weights: they are of a form that is not packed"
            announce(f"dtype {self._settings.dtype}: {name} ({path}) {kept}")

    def _packed(self, weight: _Weight, parts: Iterable[Tensor]) -> PackedWeight:
        """Of experts (E out, in)."""
        settings = self._settings
        form = (weight.bits, weight.group_size, settings.quant.weight.q_type == "symmetric")
        floating = settings.dtype != "int8"
        try:
            singles = (one for part in parts for one in (part if part.dim() == 3 else (part,)))
            rows = (one.t() if weight.is_transposed else one for one in singles)
            packed = pack_rows(rows, weight.shape, *form, floating=floating)
        except ConfigError as error:
            raise ConfigError(f"{weight.path}: {error}") from None
        return replace(packed, input_bits=_input_bits(settings))
