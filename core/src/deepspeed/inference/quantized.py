"""Weights of linear layers and experts in few bits: `init_inference(model, dtype=torch.int8)`, also "fp8" and "fp6".

Each linear layer gets a packed weight (`ops/quantizer/packed.py`), the output layer only where its bits are asked for,
and so does each expert (`PackedExperts`); biases, norms, embeddings and routers that are no plain linears keep
their type, in which the model goes on computing. For outputs y = x W^T of one layer

    |y_o - y'_o| <= sum_i |x_i| scale_o,i / 2,    scale = max|W| / (2^(bits - 1) - 1) of the group of W_o,i

where symmetric, plus the rounding of the type: what `pack_weight` rounds, times what it is multiplied with. With an
exponent, e4m3 (r = 2^-4, a = 2^-10) or e3m2 (r = 2^-3, a = 2^-5),

    |y_o - y'_o| <= sum_i |x_i| max(r |W_o,i|, a scale_o,i),    scale = max|W| / 448, or max|W| / 28

All experts of a layer are in one packed weight. `experts_form` says which modules have experts and how they keep them.
Such a module becomes one of `PackedExperts` in place, so that its name, hooks and marks stay. Packed, a weight is (E
out, in): groups never reach over an expert, since they lie in rows.

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
from deepspeed.log import announce
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


class PackedExperts(ConvertedExperts, HoldsPacked):
    """A module that holds packed weights of experts; `pack_experts` makes one."""

    prefix = "Packed"
    num_held: int  # E
    is_transposed_of: Mapping[str, bool]

    def product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """Multiply the first `counts[0]` rows with the first expert's weight, and so on."""
        return packed_grouped_linear(rows, self.packed_weights[name], counts, getattr(self, f"{name}_bias", None))

    def bytes_of(self, name: str) -> Tensor:
        """Return the packed bytes, [E, out, bytes of a row] where the parameter has one expert at each index."""
        packed = self.packed_weights[name]
        if self.get_parameter(name).dim() == 2:
            return packed.data
        return packed.data.view(self.num_held, packed.shape[0] // self.num_held, packed.data.shape[1])

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the numbers that a packed weight stands for, in the shape that the module's weight had."""
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
    """Experts that get tokens, and for each token its experts and their weights, as `ops.experts` says."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        return run_experts(self, self.product, self.num_held, hidden_states, top_k_index, top_k_weights)


class EveryTokensExperts(PackedExperts):
    """Experts of Llama 4, each of which gets every token, times its weight: 0 for experts that it does not go to."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[E T, H] -> [E T, H]. Rows of zeros give zeros, and are left out."""
        used_N = hidden_states.any(dim=-1)
        counts = used_N.view(self.num_held, -1).sum(dim=1).tolist()
        output = torch.zeros_like(hidden_states)
        output[used_N] = run_sorted(self, self.product, hidden_states[used_N], counts)
        return output


class SortedProducts(PackedExperts):
    """One product of JetMoe: the weights of all experts for rows that are sorted by expert."""

    def forward(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """[N, in] -> [N, out], with `expert_size` rows of each expert."""
        return self.product(inputs, "weight", expert_size)


class ExpertsOfPart(ConvertedExperts):
    """Experts of DBRX, whose part `mlp` holds the weights, and an activation for the gate."""

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
    """`ExpertsForm` says how a module of experts keeps its weights, and which class the module gets when packed.

    Fields:
        base: the module gets a class derived from this one.
        is_transposed: by the name of each weight: [E, in, out], or [E in, out], rather than [E, out, in].
        part: the name of the submodule that holds the weights; "": the module itself.
    """

    base: type[ConvertedExperts]
    is_transposed: Mapping[str, bool]
    part: str = ""

    def holder(self, module: nn.Module) -> nn.Module:
        """Return what holds the weights."""
        return module.get_submodule(self.part)


#: by the name of the class, since core does not need transformers
_FORMS = {
    "llama4.modeling_llama4.Llama4TextExperts": ExpertsForm(
        EveryTokensExperts, {"gate_up_proj": True, "down_proj": True}
    ),
    "jetmoe.modeling_jetmoe.JetMoeParallelExperts": ExpertsForm(SortedProducts, {"weight": False}),
    "dbrx.modeling_dbrx.DbrxExperts": ExpertsForm(ExpertsOfPart, {"w1": False, "v1": False, "w2": True}, "mlp"),
}


def experts_form(module: nn.Module) -> ExpertsForm | None:
    """Return how a module keeps experts; None: it has none that are packed."""
    if is_experts(module):
        return ExpertsForm(RoutedExperts, dict.fromkeys(names_of_weights(module), is_transposed(module)))
    cls = type(module)
    return _FORMS.get(f"{cls.__module__}.{cls.__qualname__}".removeprefix("transformers.models."))


def pack_experts(module: nn.Module, form: ExpertsForm, num_experts: int, packed: dict[str, PackedWeight]) -> None:
    """Let experts compute with packed weights, in place."""
    holder = form.holder(module)
    if holder is not module:
        module.__class__ = converted_class(form.base, type(module))
    holder.__class__ = converted_class(form.base if holder is module else PackedExperts, type(holder))
    assert isinstance(holder, PackedExperts)
    holder.num_held, holder.is_transposed_of = num_experts, form.is_transposed
    holder.hold_packed(packed)
