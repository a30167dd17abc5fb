"""The experts of a rank: copies of a user's module (`Experts`), or `ExpertMLP`s with stacked weights.

Each copy runs on a contiguous slice of the rows (`Experts`). With stacked weights, one grouped matrix product computes
all experts (`StackedExperts`):

    moe = MoE(1024, ExpertMLP(1024, 4096, activation="silu", gated=True), num_experts=64, k=2)

The weights are [L, out, in], with expert e at index e. The values equal the weights of single `ExpertMLP`s.

AutoEP divides the experts of a transformers model over ranks (`expert_parallel` of the configuration).

    {"expert_parallel": {"enabled": true, "autoep_size": 2}}

transformers keeps the experts of a layer (Mixtral, Qwen-MoE, DeepSeek, OLMoE, ...) in one module with the parameters
`gate_up_proj` [E, 2 F, H] and `down_proj` [E, H, F]. Its forward takes the tokens, the experts that the router chose
and their weights. Its class declares variations: biases, [E, in, out] instead of [E, out, in], no gate, a custom gate
(GPT-OSS). `DividedExperts` replaces such a module. Parameters keep their names and stay the same objects, so an
optimizer that has them stays valid. Router, shared experts and losses remain the model's own.

Shape legend: T tokens, K experts of a token, N rows sorted by expert, E experts of all ranks, L experts of this rank,
H width, F inner width, I inputs, O outputs.
"""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import GroupBackend
from deepspeed.config.parallel import ExpertParallelConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.moe.dispatch import dispatch, token_ranks
from deepspeed.moe.gate import Routing
from deepspeed.ops.experts import DOWN, has_params_of_experts, inner_of, is_experts, is_transposed, up_name
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import (
    EXPERT_PREFIX,
    ModelPart,
    ModuleOfExperts,
    mark_as_expert,
    mark_names,
    mark_part,
    part_held,
    whole_shape,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
#: rows of grouped matrix products begin at multiples of this many bytes
_ALIGNMENT_BYTES = 16


class ExpertMLP(nn.Module):
    """A feed-forward expert without biases: `down(act(up(x)))`, or gated, `down(act(gate(x)) * up(x))`.

    Args:
        hidden_size: H.
        intermediate_size: F.
        activation: one of `ACTIVATIONS`.
        gated: use a gate, as in Llama and Mixtral (with "silu").

    Raises:
        ConfigError: for an unknown activation.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str = "gelu", *, gated: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"ExpertMLP: found activation {activation!r}; give one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        act = ACTIVATIONS[self.activation]
        inner = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output


class StackedExperts(ModuleOfExperts):
    """Several `ExpertMLP`s with stacked parameters `up`, `gate` (if gated) and `down`.

    Args:
        experts: experts of one kind and size; their weights are copied.
        ep_size: number of ranks over which the layer's experts are divided; parameters are marked with it.
    """

    def __init__(self, experts: Sequence[ExpertMLP], ep_size: int = 1) -> None:
        super().__init__()
        self.num_local_experts = len(experts)
        self.activation = experts[0].activation
        with torch.no_grad():  # clone each weight: zero.Init gathers only a weight that is used alone
            self.up = nn.Parameter(torch.stack([expert.up.weight.clone() for expert in experts]))
            gates = [expert.gate.weight.clone() for expert in experts if expert.gate is not None]
            self.gate = nn.Parameter(torch.stack(gates)) if gates else None
            self.down = nn.Parameter(torch.stack([expert.down.weight.clone() for expert in experts]))
        self.mark_as_experts(ep_size)

    def forward(self, rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
        """Run expert e on its `counts[e]` rows; `rows_NH` is sorted by expert."""
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            inner_NF = act(grouped_linear(rows_NH, self.up, counts))
        else:
            inner_NF = act(grouped_linear(rows_NH, self.gate, counts)) * grouped_linear(rows_NH, self.up, counts)
        return grouped_linear(inner_NF, self.down, counts)

    def mark(self, path: str, part: int, num_parts: int) -> None:
        """Mark these as part `part` of the experts of the layer `path`."""
        for name, param in self.named_parameters():
            shape = getattr(param, "ds_shape", param.shape)
            whole = torch.Size((shape[0] * num_parts, *shape[1:]))
            mark_part(
                param, ModelPart(whole, 0, ((part * shape[0], (part + 1) * shape[0]),), f"{path}.{name}"), over="ep"
            )


def grouped_linear(rows_NI: Tensor, weight_LOI: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply `F.linear` to the first `counts[0]` rows with `weight_LOI[0]`, to the next with `weight_LOI[1]`, and so on.

    Under autocast, it computes in the autocast dtype.
    """
    device = rows_NI.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_NI, weight_LOI = rows_NI.to(dtype), weight_LOI.to(dtype)
    out_NO: Tensor = _GroupedLinear.apply(rows_NI, weight_LOI, counts)
    return out_NO


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weight_LOI: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_NI, weight_LOI)
        ctx.counts = counts
        return _by_group(rows_NI.contiguous(), weight_LOI.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_NI, weight_LOI = ctx.saved_tensors
        grads_NO = grads_NO.contiguous()
        to_rows, to_weight = None, None
        if ctx.needs_input_grad[0]:
            to_rows = _by_group(grads_NO, weight_LOI, ctx.counts)
        if ctx.needs_input_grad[1]:
            to_weight = _weight_gradient(grads_NO, rows_NI.contiguous(), ctx.counts)
        return to_rows, to_weight, None


def _by_group(rows_NA: Tensor, matrix_LAB: Tensor, counts: Sequence[int]) -> Tensor:
    if _grouped_mm_serves(rows_NA, matrix_LAB):
        return torch._grouped_mm(rows_NA, matrix_LAB, offs=_ends(counts, rows_NA.device))
    out_NB = rows_NA.new_empty(len(rows_NA), matrix_LAB.shape[2])
    for out, rows, matrix in zip(out_NB.split(list(counts)), rows_NA.split(list(counts)), matrix_LAB, strict=True):
        torch.mm(rows, matrix, out=out)
    return out_NB


def _weight_gradient(grads_NO: Tensor, rows_NI: Tensor, counts: Sequence[int]) -> Tensor:
    if _grouped_mm_serves(grads_NO, rows_NI):
        return torch._grouped_mm(grads_NO.t(), rows_NI, offs=_ends(counts, rows_NI.device))
    weight_LOI = rows_NI.new_empty(len(counts), grads_NO.shape[1], rows_NI.shape[1])
    for out, grads, rows in zip(weight_LOI, grads_NO.split(list(counts)), rows_NI.split(list(counts)), strict=True):
        torch.mm(grads.t(), rows, out=out)
    return weight_LOI


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(device, torch.int32)


def _grouped_mm_serves(*tensors: Tensor) -> bool:
    """Whether torch's kernel supports the tensors: aligned rows, at least one row, and a supported device."""
    widths = [width for tensor in tensors for width in tensor.shape[1:]]
    is_aligned = all(width * tensors[0].element_size() % _ALIGNMENT_BYTES == 0 for width in widths)
    return is_aligned and len(tensors[0]) > 0 and get_accelerator().is_grouped_mm_supported()


#: a module that is copied for every expert; or a function that creates one, called once per expert of the layer
ExpertSource = nn.Module | Callable[[], nn.Module]


class Experts(ModuleOfExperts):
    """Consecutive experts of a layer, as `deepspeed_experts.0`, `deepspeed_experts.1`, ...

    Every expert runs in every forward, even without rows, so ranks with the same expert use the same parameters.

    Args:
        experts: modules from [n, H] to [n, H']; of a tuple, as Megatron's layers return, the first output is used.
        ep_size: number of ranks over which the layer's experts are divided; parameters are marked with it.
    """

    def __init__(self, experts: Iterable[nn.Module], ep_size: int = 1) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(experts)
        self.num_local_experts = len(self.deepspeed_experts)
        self.mark_as_experts(ep_size)

    def forward(self, rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
        """Run expert e on its `counts[e]` rows; `rows_NH` is sorted by expert."""
        parts = rows_NH.split(list(counts))
        outputs = [_first(expert(part)) for expert, part in zip(self.deepspeed_experts, parts, strict=True)]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def divide(self, mesh: Mesh, divide: Callable[[nn.Module, Mesh], None] | None) -> None:
        """Divide each expert over the tensor-parallel ranks of `mesh`, which get the same rows and call this together.

        Args:
            divide: divides an expert in place; None: not available.

        Raises:
            ConfigError: if experts cannot be divided.
        """
        if any(getattr(param, "tensor_model_parallel", False) for param in self.parameters()):
            return
        if divide is None:
            raise ConfigError(
                "MoE: found enable_expert_tensor_parallelism without an engine; pass the model to "
                "deepspeed.initialize, which divides the experts, or experts that are divided already"
            )
        if any(hasattr(param, "ds_id") for param in self.parameters()):
            raise ConfigError(
                "MoE: found enable_expert_tensor_parallelism with experts that were sharded by zero.Init; build the "
                "layer without it: an expert is divided first, and stage 3 shards what each rank holds"
            )
        for expert in self.deepspeed_experts:
            divide(expert, mesh)

    def mark(self, path: str, part: int, num_parts: int) -> None:
        """Mark these as part `part` of the experts of the layer `path`."""
        for number, expert in enumerate(self.deepspeed_experts, part * self.num_local_experts):
            for name, param in expert.named_parameters():
                whole_name = f"{path}.deepspeed_experts.{number}.{name}"
                known = part_held(param)  # set if tensor-parallel ranks divide the expert
                if known is not None:
                    mark_part(param, replace(known, name=whole_name))
                    continue
                mark_part(param, ModelPart.all_of(whole_shape(param), whole_name), over="ep")
        experts, first = "deepspeed_experts", part * self.num_local_experts
        mark_names(
            self,
            {
                f"{experts}.{number}.{name}": f"{path}.{experts}.{first + number}.{name}"
                for number, expert in enumerate(self.deepspeed_experts)
                for named in (expert.named_parameters, expert.named_buffers)
                for name, _ in named(remove_duplicate=False)
            },
        )


def make_experts(source: ExpertSource, num_experts: int, held: range) -> list[nn.Module]:
    """Create the experts `held` of `num_experts`.

    Copies of a module are equal. A function is called for all experts in order, so a random seed gives the same experts
    and the same later layers, however many ranks divide the experts.

    Raises:
        ConfigError: for a module that `zero.Init` has sharded, since no rank has a whole copy; or for another type.
    """
    if isinstance(source, nn.Module):
        if any(hasattr(param, "ds_id") for param in source.parameters()):
            raise ConfigError(
                f"MoE: the expert ({type(source).__name__}) was sharded by zero.Init and cannot be copied; pass a "
                "function that makes it, such as lambda: Expert(...)"
            )
        return [copy.deepcopy(source) for _ in held]
    if not callable(source):
        raise ConfigError(
            f"MoE: expert is {type(source).__name__}; give a module, of which copies are made, or a function "
            "that makes one, such as lambda: Expert(...)"
        )
    made: list[nn.Module] = []
    for index in range(num_experts):
        expert = source()
        if not isinstance(expert, nn.Module):
            raise ConfigError(f"MoE: expert gave {type(expert).__name__}; give a module, or a function that makes one")
        if index in held:
            made.append(expert)
    return made


def hold_experts(experts: list[nn.Module], ep_size: int, *, one_by_one: bool = False) -> Experts | StackedExperts:
    """Wrap this rank's experts: stacked if all are `ExpertMLP`s and not `one_by_one`, else one by one."""
    stackable = [] if one_by_one else [expert for expert in experts if type(expert) is ExpertMLP]
    return StackedExperts(stackable, ep_size) if len(stackable) == len(experts) else Experts(experts, ep_size)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


#: keys that this version supports; `preset_model` is not needed, since experts are recognized by their parameters
_SUPPORTED = {"enabled", "autoep_size", "expert_tensor_parallel_size", "preset_model", "moe_layer_pattern"}


class DividedExperts(nn.Module):
    """Part `ranks.rank` of the experts of `module`. The module's parameters are cut in place.

    Args:
        path: name of the module in the model.
        ranks: the ranks that hold equal parts of the experts.
    """

    def __init__(self, module: nn.Module, path: str, ranks: GroupBackend) -> None:
        super().__init__()
        self._ranks = ranks
        self._up = up_name(module)
        self._inner: Callable[[Tensor], Tensor] = inner_of(module)
        self._is_transposed = is_transposed(module)
        self.num_experts = _num_experts(module)
        start, stop = (self.num_experts * place // ranks.world_size for place in (ranks.rank, ranks.rank + 1))
        for name, param in list(module.named_parameters(recurse=False)):
            part = ModelPart(param.shape, 0, ((start, stop),), f"{path}.{name}")
            param.data = param.data[start:stop].clone()
            mark_as_expert(param, f"{EXPERT_PREFIX}{ranks.world_size}")
            mark_part(param, part, over="ep")
            self.register_parameter(name, param)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]. A collective of the ranks that hold the experts."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts_TK = top_k_index.reshape(len(x_TH), -1)
        routing = Routing(
            experts=experts_TK,
            weights=top_k_weights.reshape(len(x_TH), -1),
            kept=experts_TK < self.num_experts,  # transformers uses larger indices for tokens that go nowhere
            counts=torch.bincount(experts_TK.reshape(-1), minlength=self.num_experts)[: self.num_experts],
            loss=x_TH.new_zeros(()),
            capacity=None,
        )
        return dispatch(x_TH, routing, self._run, self._ranks).view_as(hidden_states)

    def _run(self, rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
        return self._linear(self._inner(self._linear(rows_NH, self._up, counts)), DOWN, counts)

    def _linear(self, rows_NI: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        weight = self.get_parameter(name)
        out_NO = grouped_linear(rows_NI, weight.transpose(1, 2) if self._is_transposed else weight, counts)
        bias_LO = getattr(self, f"{name}_bias", None)
        if bias_LO is None:
            return out_NO
        repeats = torch.tensor(counts, device=out_NO.device)
        return out_NO + bias_LO.to(out_NO.dtype).repeat_interleave(repeats, dim=0, output_size=len(out_NO))


def divide_experts(model: nn.Module, mesh: Mesh, section: ExpertParallelConfig) -> None:
    """Divide the experts of every layer over `autoep_size` ranks; called by `initialize`. A collective of all ranks.

    Raises:
        ConfigError: for unsupported keys, a model without such layers, a number of experts or a mesh that the size does
            not divide, or parameters that `zero.Init` has already sharded.
    """
    _refuse_unsupported(section)
    size = section.autoep_size
    pattern = re.compile(section.moe_layer_pattern or "")
    found = [(path, each) for path, each in model.named_modules() if _can_divide(each) and pattern.search(path)]
    if not found:
        wanted = f" whose names match {section.moe_layer_pattern!r}" if section.moe_layer_pattern else ""
        raise ConfigError(
            f"expert_parallel: found no experts in {type(model).__name__}{wanted}; they are modules with the "
            "parameters gate_up_proj and down_proj and no others but their biases, as in Mixtral, Qwen-MoE, "
            "DeepSeek and GPT-OSS of transformers 5"
        )
    for path, module in found:
        num_experts = _num_experts(module)
        if num_experts % size:
            raise ConfigError(
                f"expert_parallel.autoep_size: found {size}, and {path} has {counted(num_experts, 'expert')}; give a "
                "divisor of them"
            )
    if size == 1:
        return
    ranks = token_ranks(mesh, size)
    for path, module in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, DividedExperts(module, path, ranks))


def _refuse_unsupported(section: ExpertParallelConfig) -> None:
    for name in sorted(section.model_fields_set - _SUPPORTED):
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if getattr(section, name) != default:
            raise ConfigError(
                f"expert_parallel.{name}: found {getattr(section, name)!r}, which is not in this version; experts are "
                "found by their parameters, and the router is the model's own: omit it"
            )


def _can_divide(module: nn.Module) -> bool:
    """Whether the module has experts in the form that `DividedExperts` supports.

    Raises:
        ConfigError: `zero.Init` has already sharded them.
    """
    if has_params_of_experts(module) and any(hasattr(param, "ds_id") for param in module.parameters()):
        raise ConfigError(
            f"expert_parallel: the experts ({type(module).__name__}) were sharded by zero.Init; build the model "
            "without it: the experts are divided first, and stage 3 shards what each rank holds"
        )
    return is_experts(module)


def _num_experts(module: nn.Module) -> int:
    return len(module.get_parameter(DOWN))
