"""Weights of linear layers and experts in few bits: `init_inference(model, dtype=torch.int8)`, also "fp8" and "fp6".

Each linear layer gets a packed weight (`ops/quantizer/packed.py`), the output layer only where its bits are asked for,
and so does each expert (`packed_experts.py`); biases, norms, routers and embeddings keep their type, in which the model
goes on computing. For outputs y = x W^T of one layer

    |y_o - y'_o| <= sum_i |x_i| scale_o,i / 2,    scale = max|W| / (2^(bits - 1) - 1) of the group of W_o,i

where symmetric, plus the rounding of the type: what `pack_weight` rounds, times what it is multiplied with. With an
exponent, e4m3 (r = 2^-4, a = 2^-10) or e3m2 (r = 2^-3, a = 2^-5),

    |y_o - y'_o| <= sum_i |x_i| max(r |W_o,i|, a scale_o,i),    scale = max|W| / 448, or max|W| / 28
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.config.inference import DeepSpeedInferenceConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.inference.packed_experts import pack_experts, weights_of_experts
from deepspeed.log import announce
from deepspeed.ops.quantizer.packed import PackedWeight, check_bits, pack_weight, packed_linear, stack_packed
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


@torch.no_grad()
def quantize(model: nn.Module, groups_of: GroupsOf, settings: DeepSpeedInferenceConfig) -> None:
    """Give the linear layers and experts of `model` packed weights, in place.

    One whole weight at a time is in memory beside them.

    Raises:
        ConfigError: a number of groups does not fit a weight; names the layer, and the sizes that fit.
    """
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    left: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        is_transposed = type(module).__name__ == "Conv1D" or getattr(module, "transposed", False)
        is_divided = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        bits = _bits(settings, module is head)
        if (experts := weights_of_experts(module)) is not None and bits is not None:
            packed_by_name = {
                name: _pack(weight, groups_of(path), settings, bits, f"{path}.{name}")
                for name, weight in experts.items()
            }
            pack_experts(module, packed_by_name)
            continue
        if "Experts" in type(module).__name__ and any(each.dim() == 3 for each in module.parameters(recurse=False)):
            left.setdefault(type(module).__name__, path)
        if bits is None or not (is_divided or type(module) is nn.Linear or type(module).__name__ in _LINEARS):
            continue
        weight: Any = module.weight
        packed = _pack(weight.t() if is_transposed else weight, groups_of(path), settings, bits, path)
        if is_divided:
            module.pack(packed)
        else:
            bias: Any = module.bias
            model.set_submodule(path, PackedLinear(packed, bias, is_transposed))
    for name, path in left.items():
        announce(f"dtype {settings.dtype}: {name} ({path}) keep their weights: they are of a form that is not packed")


def _pack(weight: Tensor, num_groups: int, settings: DeepSpeedInferenceConfig, bits: int, path: str) -> PackedWeight:
    """A weight [out, in], or of experts [E, out, in], one by one: (E out, in)."""
    rows, cols = weight.shape[-2:]
    per_row = -(-num_groups // rows)
    if cols % per_row:
        raise ConfigError(
            f"quant.weight.q_groups: found {counted(num_groups, 'group')} for {path}, whose weight is {rows} x {cols}: "
            f"{per_row} per row do not divide {cols}; give a multiple of {rows} times a divisor of {cols}, or 1"
        )
    symmetric = settings.quant.weight.q_type == "symmetric"

    def packed_of(one: Tensor) -> PackedWeight:
        packed = pack_weight(one.contiguous(), bits, cols // per_row, symmetric, floating=settings.dtype != "int8")
        return replace(packed, input_bits=_input_bits(settings))

    try:
        return packed_of(weight) if weight.dim() == 2 else stack_packed([packed_of(one) for one in weight])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
