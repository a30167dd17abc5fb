"""Weights of linear layers and experts in few bits: `init_inference(model, dtype=torch.int8)`, also "fp8" and "fp6".

Each linear layer and each expert (`PackedExperts`) gets a packed weight (`ops/quantizer/packed.py`); the output layer
gets one only if its bits are given. Biases, norms, embeddings and routers that are no plain linears keep their dtype,
in which the model computes. For outputs y = x W^T of one layer

    |y_o - y'_o| <= sum_i |x_i| scale_o,i / 2,    scale = max|W| / (2^(bits - 1) - 1) of the group of W_o,i

for symmetric quantization, plus the rounding of the dtype: the rounding error of `pack_weight`, times the inputs. For
floating formats, e4m3 (r = 2^-4, a = 2^-10) or e3m2 (r = 2^-3, a = 2^-5),

    |y_o - y'_o| <= sum_i |x_i| max(r |W_o,i|, a scale_o,i),    scale = max|W| / 448, or max|W| / 28

One packed weight holds all experts of a layer. `experts_form` says which modules have experts, and how they store them.
Such a module changes its class to `PackedExperts` in place, so it keeps its name, hooks and marks. A packed weight is
(E out, in): groups lie within rows, so no group spans two experts.

Shape legend: T tokens, K experts of a token, N rows, E experts, H width.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.config.inference import DeepSpeedInferenceConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.log import announce, warn_once
from deepspeed.ops.experts import (
    ConvertedExperts,
    by_expert,
    converted_class,
    is_experts,
    is_transposed,
    names_of_weights,
    run_experts,
    run_sorted,
)
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.ops.quantizer.packed import PackedWeight, check_bits, pack_rows, packed_grouped_linear, packed_linear
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, HoldsPacked, MayBePacked, RowParallelLinear

# classes of transformers that compute the same product as torch.nn.Linear
_LINEARS = ("Conv1D", "FalconLinear")
# path of a layer -> minimum number of groups of its weight
GroupsOf = Callable[[str], int]


class PackedLinear(MayBePacked):
    """A linear layer with a packed weight, for inference.

    Args:
        packed: [out, in].
        bias: [out].
        transposed: whether the weight of the original layer was [in, out].
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
        """The packed bytes. The attribute exists because models read the dtype of a layer's weight."""
        return self.packed_weights["weight"].data

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out], in the dtype of x."""
        return packed_linear(x, self.packed_weights["weight"], self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.packed_weights['weight'].form}"


def layer_groups(settings: DeepSpeedInferenceConfig) -> GroupsOf | None:
    """Return the function path -> minimum number of groups of that layer's weight; None: no quantization.

    Raises:
        ConfigError: a quantization setting is invalid, or is given with a dtype that does not pack weights.
    """
    setting = settings.quantization_setting
    quant = settings.quant
    if not settings.packs:
        if setting is not None or (quant.enabled and quant.model_fields_set - {"enabled"}):
            name = "quantization_setting" if setting is not None else "quant"
            found = setting or settings.quant.model_dump(exclude_unset=True)
            raise ConfigError(
                f"{name}: found {found!r} with dtype {settings.dtype!r}; weights are quantized with dtype int8, fp8 "
                "and fp6"
            )
        if quant.enabled and "enabled" in quant.model_fields_set:
            warn_once(
                f"quant.enabled: found true with dtype {settings.dtype!r}, with which no weight is quantized; give "
                "dtype int8, fp8 or fp6"
            )
        return None
    if not quant.enabled:
        raise ConfigError(
            f"quant.enabled: found false with dtype {settings.dtype!r}, which quantizes weights; give dtype fp32, fp16 "
            "or bf16, or leave quant.enabled out"
        )
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
    """Return the bits per number in a layer's packed weight (of the output layer if `is_head`); None: not packed."""
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
    """Return the bits to which kernels may round the inputs of a product."""
    config = settings.quant.activation
    return 16 if config is None or not config.enabled else config.num_bits


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the floating-point type that most of the model's parameters have."""
    counts: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=counts.__getitem__) if counts else torch.get_default_dtype()


@dataclass
class _Weight:
    """A weight to pack. In the module its shape is [out, in], or [in, out] if transposed.

    A weight of experts is [E, out, in], or the experts' matrices concatenated along dimension 0.
    """

    module: nn.Module
    name: str
    path: str
    bits: int
    group_size: int
    is_transposed: bool
    num_experts: int  # 0 for a linear

    @property
    def single_shape(self) -> tuple[int, int]:
        """The shape of the matrix, or of one expert's matrix, in the module."""
        shape = self.tensor.shape
        return shape[:-1].numel() // self.num_parts, shape[-1]

    @property
    def num_parts(self) -> int:
        """The number of matrices in the weight: one per expert, or 1."""
        return max(self.num_experts, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the packed weight: (out, in), or (E out, in)."""
        rows, cols = self.single_shape[:: -1 if self.is_transposed else 1]
        return self.num_parts * rows, cols

    @property
    def tensor(self) -> Tensor:
        """The module's current parameter."""
        found: Tensor = getattr(self.module, self.name)
        return found


class Packing:
    """The plan that packs the weights of a model's linear layers and experts.

    Created after the model is divided; values may come later (`take`). Besides the packed weights, memory holds at most
    one whole weight, or one expert from a file.

    Raises:
        ConfigError: a number of groups does not fit a weight; the message names the layer, and the sizes that fit.
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
        """Return whether the weight of this module is packed; note experts whose weights are not packed."""
        if "Experts" in type(module).__name__ and any(each.dim() == 3 for each in module.parameters(recurse=False)):
            self._left.setdefault(type(module).__name__, path)
        is_divided = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        return is_divided or type(module) is nn.Linear or type(module).__name__ in _LINEARS

    def _of_experts(
        self, path: str, module: nn.Module, form: "ExpertsForm", num_groups: int, bits: int
    ) -> list[_Weight]:
        owner: Any = module
        holder = form.holder(module)
        prefix = f"{path}.{form.part}" if form.part else path
        weights = []
        for name, transposed in form.is_transposed.items():
            tensor = holder.get_parameter(name)
            num_experts = len(tensor) if tensor.dim() == 3 else owner.num_experts
            weight = _Weight(holder, name, f"{prefix}.{name}", bits, 0, transposed, num_experts)
            weights.append(self._grouped(weight, num_groups))
        return weights

    def _grouped(self, weight: _Weight, num_groups: int) -> _Weight:
        """Set the group size of the weight, so that a matrix has at least `num_groups` groups."""
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
        """Return whether `take` accepts a parameter's values; it does not if another module shares the parameter."""
        return id(param) in self._by_param

    def num_parts_of(self, param: Tensor) -> int:
        """Return the number of equal parts along dimension 0 in which `take` accepts a parameter: one per expert."""
        return self._by_param[id(param)].num_parts

    def take(self, param: Tensor, parts: Iterable[Tensor]) -> None:
        """Pack the values of a parameter, given as parts along dimension 0. The parameter itself does not get them."""
        self._taken[id(param)] = self._packed(self._by_param[id(param)], parts)

    @torch.no_grad()
    def apply(self) -> None:
        """Switch the modules to packed weights, in place: values given to `take`, or else their current weights."""
        self._by_param.clear()
        while self._modules:  # pop, so that each weight is freed after it is packed
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
        """Pack the matrices in `parts`, concatenated along dimension 0: (E out, in) for experts."""
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


class PackedExperts(ConvertedExperts, HoldsPacked):
    """A module with packed weights of experts; `pack_experts` converts modules to it."""

    prefix = "Packed"
    num_held: int  # E
    is_transposed_of: Mapping[str, bool]

    def product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """Multiply the first `counts[0]` rows with the first expert's weight, and so on."""
        return packed_grouped_linear(rows, self.packed_weights[name], counts, getattr(self, f"{name}_bias", None))

    def bytes_of(self, name: str) -> Tensor:
        """Return the packed bytes, as [E, out, bytes of a row] if the parameter is indexed by expert."""
        packed = self.packed_weights[name]
        if self.get_parameter(name).dim() == 2:
            return packed.data
        return packed.data.view(self.num_held, packed.shape[0] // self.num_held, packed.data.shape[1])

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the numbers of a packed weight, in the shape of the module's original weight."""
        numbers = super().numbers_of(name, dtype)
        stacked = numbers.view(self.num_held, -1, numbers.shape[1])
        if self.is_transposed_of[name]:
            stacked = stacked.transpose(1, 2).contiguous()
        return stacked.flatten(0, 1) if self.get_parameter(name).dim() == 2 else stacked

    def extra_repr(self) -> str:
        def shown(name: str, packed: PackedWeight) -> str:
            return f"{name}: {self.num_held} of {packed.shape[1]} -> {packed.shape[0] // self.num_held}, {packed.form}"

        return "; ".join(shown(*each) for each in self.packed_weights.items())


class RoutedExperts(PackedExperts):
    """Experts whose forward gets tokens, and the experts and routing weights of each token (`ops.experts`)."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        return run_experts(self, self.product, self.num_held, hidden_states, top_k_index, top_k_weights)


class EveryTokensExperts(PackedExperts):
    """Experts of Llama 4: each expert gets every token times its routing weight, which is 0 for unused experts."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [E T, H] to [E T, H]. Rows of zeros are skipped, because their outputs are zero."""
        used_N = hidden_states.any(dim=-1)
        counts = used_N.view(self.num_held, -1).sum(dim=1).tolist()
        output = torch.zeros_like(hidden_states)
        output[used_N] = run_sorted(self, self.product, hidden_states[used_N], counts)
        return output


class SortedProducts(PackedExperts):
    """One product of JetMoe: all experts' weights, applied to rows that are sorted by expert."""

    def forward(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """Map [N, in] to [N, out]; `expert_size` holds the number of rows per expert."""
        return self.product(inputs, "weight", expert_size)


class ExpertsOfPart(ConvertedExperts):
    """Experts of DBRX; their submodule `mlp` holds the weights, and an activation for the gate."""

    prefix = "Packed"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        held: Any = self.mlp

        def run(rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
            gate, up = held.product(rows_NH, "w1", counts), held.product(rows_NH, "v1", counts)
            output: Tensor = held.product(held.activation_fn(gate) * up, "w2", counts)
            return output

        return by_expert(hidden_states, top_k_index, top_k_weights, held.num_held, run)


@dataclass(frozen=True)
class ExpertsForm:
    """`ExpertsForm` says how a module stores the weights of experts, and which class it gets when packed.

    Fields:
        base: base of the class that the module gets.
        is_transposed: name of a weight -> whether it is [E, in, out], or [E in, out], rather than [E, out, in].
        part: the name of the submodule that holds the weights; "": the module itself.
    """

    base: type[ConvertedExperts]
    is_transposed: Mapping[str, bool]
    part: str = ""

    def holder(self, module: nn.Module) -> nn.Module:
        """Return the submodule that holds the weights, or the module itself."""
        return module.get_submodule(self.part)


#: keyed by the qualified name of the class, because core does not import transformers
_FORMS = {
    "llama4.modeling_llama4.Llama4TextExperts": ExpertsForm(
        EveryTokensExperts, {"gate_up_proj": True, "down_proj": True}
    ),
    "jetmoe.modeling_jetmoe.JetMoeParallelExperts": ExpertsForm(SortedProducts, {"weight": False}),
    "dbrx.modeling_dbrx.DbrxExperts": ExpertsForm(ExpertsOfPart, {"w1": False, "v1": False, "w2": True}, "mlp"),
}


def experts_form(module: nn.Module) -> ExpertsForm | None:
    """Return the form of a module's experts; None: the module has no experts, or an unsupported form."""
    if is_experts(module):
        return ExpertsForm(RoutedExperts, dict.fromkeys(names_of_weights(module), is_transposed(module)))
    cls = type(module)
    return _FORMS.get(f"{cls.__module__}.{cls.__qualname__}".removeprefix("transformers.models."))


def pack_experts(module: nn.Module, form: ExpertsForm, num_experts: int, packed: dict[str, PackedWeight]) -> None:
    """Switch experts to packed weights, in place."""
    holder = form.holder(module)
    if holder is not module:
        module.__class__ = converted_class(form.base, type(module))
    holder.__class__ = converted_class(form.base if holder is module else PackedExperts, type(holder))
    assert isinstance(holder, PackedExperts)
    holder.num_held, holder.is_transposed_of = num_experts, form.is_transposed
    holder.hold_packed(packed)
