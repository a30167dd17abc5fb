"""Weights of linear layers and experts in few bits: `init_inference(model, dtype=torch.int8)`, also "fp8" and "fp6".

Each linear layer gets a packed weight (`ops/quantizer/packed.py`), the output layer only where its bits are asked for,
and so does each expert (`packed_experts.py`); biases, norms, embeddings and routers that are no plain linears keep
their type, in which the model goes on computing. For outputs y = x W^T of one layer

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
from deepspeed.inference.packed_experts import ExpertsForm, PackedExperts, experts_form, pack_experts
from deepspeed.log import announce
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
    """Return the function path -> least number of groups of that layer's weight; None: weights are not quantized.

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
    """Return the bits of a number in a layer's packed weight, or the output layer's; None: it is not packed."""
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
    """Return the bits to which kernels may round what a weight is multiplied with."""
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
    """A weight that is packed; as the module has it, [out, in], or [in, out] where transposed.

    A weight of experts is [E, out, in], or their matrices one below the other.
    """

    module: nn.Module
    name: str
    path: str
    bits: int
    group_size: int
    is_transposed: bool
    num_experts: int  # 0: of a linear

    @property
    def single_shape(self) -> tuple[int, int]:
        """The shape of the matrix, or of one expert's, as the module has it."""
        shape = self.tensor.shape
        return shape[:-1].numel() // self.num_parts, shape[-1]

    @property
    def num_parts(self) -> int:
        """The number of matrices that the weight consists of: one per expert, or 1."""
        return max(self.num_experts, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), or (E out, in), as it is packed."""
        rows, cols = self.single_shape[:: -1 if self.is_transposed else 1]
        return self.num_parts * rows, cols

    @property
    def tensor(self) -> Tensor:
        """The parameter that the module has now."""
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
        self._modules: list[tuple[str, nn.Module, ExpertsForm | None, list[_Weight]]] = []
        self._taken: dict[int, PackedWeight] = {}
        for path, module in model.named_modules():
            bits = _bits(settings, module is head)
            if bits is None or isinstance(module, StoredLayer | PackedExperts):  # has few bits already
                continue
            if (form := experts_form(module)) is not None:
                weights = self._of_experts(path, module, form, groups_of(path), bits)
                self._modules.append((path, module, form, weights))
            elif self._is_linear(module, path):
                is_transposed = type(module).__name__ == "Conv1D" or bool(getattr(module, "transposed", False))
                weight = _Weight(module, "weight", path, bits, 0, is_transposed, 0)
                self._modules.append((path, module, None, [self._grouped(weight, groups_of(path))]))
        users = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        planned = {id(each.tensor): each for *_, weights in self._modules for each in weights}
        self._by_param = {key: each for key, each in planned.items() if users[key] == 1}

    def _is_linear(self, module: nn.Module, path: str) -> bool:
        """Tell whether the weight of this module is packed; note experts that keep theirs."""
        if "Experts" in type(module).__name__ and any(each.dim() == 3 for each in module.parameters(recurse=False)):
            self._left.setdefault(type(module).__name__, path)
        is_divided = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        return is_divided or type(module) is nn.Linear or type(module).__name__ in _LINEARS

    def _of_experts(self, path: str, module: nn.Module, form: ExpertsForm, num_groups: int, bits: int) -> list[_Weight]:
        owner: Any = module
        holder = form.holder(module)
        prefix = f"{path}.{form.part}" if form.part else path
        weights = []
        for name, is_transposed in form.is_transposed.items():
            tensor = holder.get_parameter(name)
            num_experts = len(tensor) if tensor.dim() == 3 else owner.num_experts
            weight = _Weight(holder, name, f"{prefix}.{name}", bits, 0, is_transposed, num_experts)
            weights.append(self._grouped(weight, num_groups))
        return weights

    def _grouped(self, weight: _Weight, num_groups: int) -> _Weight:
        """Give the weight the size of groups by which a matrix has `num_groups` at least."""
        rows, cols = weight.single_shape[:: -1 if weight.is_transposed else 1]
        per_row = -(-num_groups // rows)
        if cols % per_row:
            raise ConfigError(
                f"quant.weight.q_groups: found {counted(num_groups, 'group')} for {weight.path}, whose weight is "
                f"{rows} x {cols}: {per_row} per row do not divide {cols}; give a multiple of {rows} times a divisor "
                f"of {cols}, or 1"
            )
        return replace(weight, group_size=cols // per_row)

    def takes(self, param: Tensor) -> bool:
        """Whether the values of a parameter are for `take`; one that has other uses keeps its own."""
        return id(param) in self._by_param

    def num_parts_of(self, param: Tensor) -> int:
        """Return how many equal parts along its first dimension a parameter may be taken in: one per expert."""
        return self._by_param[id(param)].num_parts

    def take(self, param: Tensor, parts: Iterable[Tensor]) -> None:
        """Pack the values of a parameter, which it does not get itself: parts along its first dimension, in order."""
        self._taken[id(param)] = self._packed(self._by_param[id(param)], parts)

    @torch.no_grad()
    def apply(self) -> None:
        """Let the modules compute with packed weights, in place: those that were taken, and those that they have."""
        self._by_param.clear()
        while self._modules:  # which hold the weights until each is packed
            path, module, form, weights = self._modules.pop(0)
            packed = {}
            for each in weights:
                taken = self._taken.pop(id(each.tensor), None)
                packed[each.name] = self._packed(each, [each.tensor.detach()]) if taken is None else taken
            if form is not None:
                pack_experts(module, form, weights[0].num_experts, packed)
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.pack(packed["weight"])
            else:
                bias: Any = module.bias
                self._model.set_submodule(path, PackedLinear(packed["weight"], bias, weights[0].is_transposed))
        for name, path in self._left.items():
            kept = "keep their weights: they are of a form that is not packed"
            announce(f"dtype {self._settings.dtype}: {name} ({path}) {kept}")

    def _packed(self, weight: _Weight, parts: Iterable[Tensor]) -> PackedWeight:
        """Pack the matrices in `parts` one below the other: (E out, in) for experts."""
        settings = self._settings
        form = (weight.bits, weight.group_size, settings.quant.weight.q_type == "symmetric")
        floating = settings.dtype != "int8"
        try:
            singles = (one for part in parts for one in part.reshape(-1, *weight.single_shape))
            rows = (one.t() if weight.is_transposed else one for one in singles)
            packed = pack_rows(rows, weight.shape, *form, floating=floating)
        except ConfigError as error:
            raise ConfigError(f"{weight.path}: {error}") from None
        return replace(packed, input_bits=_input_bits(settings))
