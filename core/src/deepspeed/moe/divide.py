"""AutoEP: the experts of a transformers model, divided over ranks (`expert_parallel` of the configuration).

    {"expert_parallel": {"enabled": true, "autoep_size": 2}}

transformers keeps the experts of a layer (Mixtral, Qwen-MoE, DeepSeek, OLMoE, ...) in one module with the parameters
`gate_up_proj` [E, 2 F, H] and `down_proj` [E, H, F], whose forward takes the tokens, the experts that the router chose
and their weights. Its class declares what differs: biases, [E, in, out] in place of [E, out, in], no gate, a gate of
its own (GPT-OSS). Such a module is replaced by `DividedExperts`. Parameters keep their names and stay the same objects,
so an optimizer that has them already is right; router, shared experts and losses are the model's own.

Shape legend: T tokens, K experts of a token, N rows, E experts of all ranks, L experts of this rank, H width, F inner
width.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepspeed.comm.backend import GroupBackend
from deepspeed.config.parallel import ExpertParallelConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.moe.dispatch import dispatch, token_ranks
from deepspeed.moe.experts import grouped_linear
from deepspeed.moe.gate import Routing
from deepspeed.ops.experts import DOWN, has_params_of_experts, inner_of, is_experts, is_transposed, up_name
from deepspeed.parallel.expert_params import EXPERT_PREFIX, mark_as_expert
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import ModelPart, mark_part

#: keys that this version acts on; `preset_model` names what is recognized by its parameters
_SUPPORTED = {"enabled", "autoep_size", "expert_tensor_parallel_size", "preset_model", "moe_layer_pattern"}


class DividedExperts(nn.Module):
    """Part `ranks.rank` of the experts of `module`, whose parameters are cut in place.

    Args:
        path: name of the module in the model.
        ranks: hold the experts in equal parts.
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
        """[..., H] -> [..., H]; index and weights are [T, K]. A collective of the ranks that divide the experts."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts_TK = top_k_index.reshape(len(x_TH), -1)
        routing = Routing(
            experts=experts_TK,
            weights=top_k_weights.reshape(len(x_TH), -1),
            kept=experts_TK < self.num_experts,  # a mark of transformers' for tokens that go nowhere
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
        ConfigError: for keys that are not in this version, a model without such layers, experts that the size does not
            divide, a mesh that it does not fit, or parameters that stage 3 holds already.
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
    """Whether it has experts of the form that is divided.

    Raises:
        ConfigError: stage 3 holds them already.
    """
    if has_params_of_experts(module) and any(hasattr(param, "ds_id") for param in module.parameters()):
        raise ConfigError(
            f"expert_parallel: the experts ({type(module).__name__}) were sharded by zero.Init; build the model "
            "without it: the experts are divided first, and stage 3 shards what each rank holds"
        )
    return is_experts(module)


def _num_experts(module: nn.Module) -> int:
    return len(module.get_parameter(DOWN))
