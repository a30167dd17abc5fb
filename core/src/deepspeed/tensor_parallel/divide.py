"""`divide_model` replaces the layers that a plan names by this rank's parts of them, in place.

All ranks of the tensor-parallel group call it together, on models of equal structure; the weights are those of the
group's first rank. If the plan does not fit, the model stays unchanged.

Experts of transformers with stacked weights are divided along their inner features: every rank has a part of every
expert. `gate_up_proj` [E, 2 F, H] is cut within each half, and `down_proj` [E, H, F] in the same way. The outputs of
the experts are summed over the ranks. Every rank routes tokens as the whole model does.
"""

import copy
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import (
    EXPERT_PREFIX,
    can_reshard,
    expert_group_of,
    is_sharded,
    part_held,
    reshard,
    whole_shape,
)
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, divide_per_head
from deepspeed.tensor_parallel.plans import Along, Rule, TensorPlan
from deepspeed.tensor_parallel.ranges import (
    Cut,
    HeadShare,
    cut_dim,
    hold_part,
    mark_params,
    remember_parts,
    remember_sums,
    share_heads,
)
from deepspeed.tensor_parallel.ranks import TensorRanks, mark_divided, sum_gradient, sum_over
from deepspeed.tensor_parallel.sequence_norms import (
    divide_sequence,
    find_stack,
    tensors_in,
)
from deepspeed.tensor_parallel.vocabulary import divide_vocabulary

#: inner features are cut at multiples of this: grouped products need rows of a multiple of 16 bytes
EXPERTS_GRAIN = 8
_RANKS = "ds_tensor_ranks_of_experts"
_NUM_CHECKED = 2  # number of forwards with compared inputs: a wrong loader is wrong from the start


def ranks_of_experts(experts: nn.Module) -> TensorRanks | None:
    """Return the ranks over which these experts are divided; None if they are whole."""
    return getattr(experts, _RANKS, None)


def inner_features(experts: Any, path: str) -> int:
    """Return F, the number of inner features of the whole experts.

    Raises:
        ConfigError: the module does not have exactly the two weights.
    """
    found = {name: tuple(whole_shape(param)) for name, param in experts.named_parameters(recurse=False)}
    up, down = found.get("gate_up_proj", ()), found.get("down_proj", ())
    if len(found) != 2 or len(up) != 3 or down != (up[0], up[2], up[1] // 2):
        raise ConfigError(
            f"{path}: found experts with {found}, but those that are divided have gate_up_proj, [experts, 2 F, H], and "
            "down_proj, [experts, H, F]; keep them whole by tensor_parallel.partition_config"
        )
    return down[2]


def divide_experts(experts: Any, cuts: list[Cut], path: str, ranks: TensorRanks) -> None:
    """Keep this rank's part of the weights, and sum the output over the ranks. `cuts`: the cuts of F, by rank."""
    own = cuts[ranks.rank]
    both = [(start + half * own.total, stop + half * own.total) for half in (0, 1) for start, stop in own.ranges]
    hold_part(experts.gate_up_proj, 1, Cut(2 * own.total, tuple(both)), path, ranks.data_group)
    hold_part(experts.down_proj, 2, own, path, ranks.data_group)

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        return sum_gradient(hidden, ranks), index, sum_gradient(weights, ranks)

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(lambda _, __, output: sum_over(output, ranks))
    object.__setattr__(experts, _RANKS, ranks)


# attributes of attention modules that count heads, as models name them; they are set to this rank's counts
_COUNTS_OF_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
_COUNTS_OF_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_SIZES_OF_QUERIES = ("embed_dim", "split_size", "all_head_size", "inner_dim", "hidden_size")
_QUERIES_PER_KEY = ("num_key_value_groups", "n_rep")


@dataclass(frozen=True)
class _Division:
    """A module to divide."""

    path: str
    module: nn.Module
    rule: Rule
    cuts: list[Cut]  # by rank; [] for a module that stays whole


def divide_model(
    model: nn.Module,
    ranks: TensorRanks,
    plan: TensorPlan,
    *,
    grain: int = 1,
    keeps_logits_divided: bool = False,
    divides_sequence: bool = False,
    stays_whole: Collection[str] = (),
    has_values: bool = True,
    is_stage: bool = False,
) -> None:
    """Divide the model over `ranks`, in place.

    Args:
        plan: the layers to divide; see `entry.py`.
        grain: features are cut at multiples of this.
        keeps_logits_divided: the output layer returns this rank's part of the vocabulary, and the model's loss is
            computed from the parts.
        divides_sequence: also divide the sequence between blocks; see `sequence_norms.py`.
        stays_whole: paths of modules that the plan does not apply to.
        has_values: False: parameters may be on the meta device, and get the values of their parts later.
        is_stage: the model is a pipeline stage; all ranks call this, and at least one stage must have layers of the
            plan.

    Raises ConfigError, without changing the model, if the plan does not fit the model or the number of ranks.
    """
    _check_dividable(model, ranks, has_values=has_values)
    divisions = _find(model, ranks, plan, grain, stays_whole, is_stage=is_stage)
    stack = find_stack(model, plan) if divides_sequence else None
    _copy_from_first(model, ranks)
    ranks.agree_on_random_state()
    ranks.has_dropout = _has_dropout(model)
    for each in divisions:
        _divide(model, each, ranks)
    for each in divisions:
        _fix_counts(model, each, ranks, in_config=plan.counts_in_config)
    _divide_per_head(model, divisions, ranks, has_alibi=plan.has_alibi)
    divide_vocabulary(model, ranks, keeps_logits_divided=keeps_logits_divided)
    _shard_whole_parameters(model, ranks)
    model.register_forward_pre_hook(lambda *_: ranks.begin_forward())
    if stack is not None:
        divide_sequence(model, stack, ranks)
    remember_parts(model)
    mark_params(model, ranks)
    _end_with_exceptions(model, ranks)
    check_first_inputs(model, ranks)
    mark_divided(model, ranks)


def _end_with_exceptions(model: nn.Module, ranks: TensorRanks) -> None:
    """End a block, and its random state, if an exception leaves a forward or the module around the divided block."""

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        if output is None:  # an exception left the module
            ranks.leave()

    around = {
        path.rpartition(".")[0] for path, module in model.named_modules() if isinstance(module, ColumnParallelLinear)
    }
    for path in around:
        model.get_submodule(path).register_forward_hook(leave, always_call=True)
    model.register_forward_hook(lambda *_: ranks.end_forward(), always_call=True)


def _check_dividable(model: nn.Module, ranks: TensorRanks, *, has_values: bool) -> None:
    for path, param in model.named_parameters():
        if is_sharded(param) and not can_reshard(param):
            raise ConfigError(
                f"tensor parallelism: another engine has the parameter {path}; call destroy() on that engine first"
            )
        if is_sharded(param) and expert_group_of(param) not in (None, f"{EXPERT_PREFIX}1"):
            raise ConfigError(
                f"tensor parallelism: parameter {path} is one of experts that are divided over ranks, and was sharded "
                "by zero.Init, over ranks that do not know of tensor parallelism; build the model outside of it"
            )
        if param.is_meta and has_values:
            raise ConfigError(f"tensor parallelism: parameter {path} is on the meta device; give it values first")
    shapes = [f"{path} {tuple(whole_shape(param))}" for path, param in model.named_parameters()]
    theirs = all_gather_values(shapes, ranks.group)
    for rank, of_rank in enumerate(theirs):
        if of_rank != theirs[0]:
            one, other = next(
                (a, b) for a, b in zip([*theirs[0], "nothing"], [*of_rank, "nothing"], strict=False) if a != b
            )
            raise ConfigError(
                f"tensor parallelism: rank 0 of the group has the parameter {one} where rank {rank} has {other}; build "
                "the same model on all ranks"
            )


def _find(
    model: nn.Module,
    ranks: TensorRanks,
    plan: TensorPlan,
    grain: int,
    stays_whole: Collection[str],
    *,
    is_stage: bool,
) -> list[_Division]:
    matched = [
        (path, module, rule)
        for path, module in model.named_modules()
        if path not in stays_whole and (rule := plan.rule_for(path))
    ]
    divides = any(rule.weight != Replicate() for _, _, rule in matched)
    if not (any(all_gather_values(divides)) if is_stage else divides):
        if not plan.rules:  # a partition_config for a pipeline, with patterns that match nothing
            names = [name for name, _ in model.named_parameters() if name.endswith("weight")][:3]
            raise ConfigError(
                "tensor_parallel.partition_config.layer_specs: no pattern matches a weight of any stage of the "
                f"pipeline; those of this one have names such as {', '.join(names)}"
            )
        raise ConfigError(
            f"tensor parallelism: no layer of {type(model).__name__} is named as the plan {plan.name!r} expects "
            f"({', '.join(rule.path for rule in plan.rules[:4])} ...); describe its layers in "
            "tensor_parallel.partition_config"
        )
    num_ranks = ranks.world_size
    shares: list[HeadShare] = []
    if plan.heads is not None and any(rule.along is not Along.FEATURES for _, _, rule in matched):
        shares = share_heads(*plan.heads(model.config), num_ranks, f"the attention of {type(model).__name__}")
    cut = partial(cut_dim, shares=shares, num_ranks=num_ranks)
    divisions = []
    for path, module, rule in matched:
        grain_here = math.lcm(grain, EXPERTS_GRAIN) if rule.experts else grain
        cuts = [] if rule.weight == Replicate() else cut(rule, _dim_size(module, rule, path), path, grain=grain_here)
        divisions.append(_Division(path, module, rule, cuts))
    return divisions


def _dim_size(module: nn.Module, rule: Rule, path: str) -> int:
    """Return the size of the whole weight along the divided dim."""
    assert isinstance(rule.weight, Shard)
    if rule.experts:
        return inner_features(module, path)
    if type(module) is nn.Embedding:
        return whole_shape(module.weight)[rule.weight.dim]
    return whole_shape(_weight(module, path))[_dim_of(module, rule)]


def _dim_of(module: nn.Module, rule: Rule) -> int:
    """Return the divided dim of the weight as stored."""
    assert isinstance(rule.weight, Shard)
    return 1 - rule.weight.dim if _is_transposed(module) else rule.weight.dim


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # transformers' own, of GPT-2


def _weight(module: nn.Module, path: str) -> Tensor:
    if not is_plain_linear(module) and not _is_transposed(module):
        raise ConfigError(
            f"{path}: found a {type(module).__module__}.{type(module).__qualname__}, and only layers that compute as "
            "torch.nn.Linear does can be divided; divide the model before its layers are replaced by others, or keep "
            "this one whole"
        )
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a layer computes x W^T + b and nothing else: `torch.nn.Linear`, or Falcon's, which equals it."""
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward or type(module).__name__ == "FalconLinear"


def _copy_from_first(model: nn.Module, ranks: TensorRanks) -> None:
    peers = set(torch.distributed.get_process_group_ranks(ranks.group))

    def of_first(value: Tensor) -> Tensor:
        ranks.copy_from_first(value)
        return value

    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_meta:
            continue
        if not is_sharded(tensor):
            ranks.copy_from_first(tensor.data)
            continue
        holders: Any = tensor.ds_process_group  # type: ignore[attr-defined]
        if not peers <= set(torch.distributed.get_process_group_ranks(holders)):  # else they are equal already
            assert isinstance(tensor, nn.Parameter)
            reshard(tensor, of_first, holders)


def _shard_whole_parameters(model: nn.Module, ranks: TensorRanks) -> None:
    """Shard parameters that stay whole over the ranks that hold the same parts, like the divided ones. ZeRO-3 gathers
    them in an order that may differ between ranks with different parts."""
    for param in model.parameters():
        if is_sharded(param) and part_held(param) is None:
            reshard(param, lambda value: value, ranks.data_group)


def _has_dropout(model: nn.Module) -> bool:
    """Whether a forward may draw random numbers, judged by dropout modules and attributes with "drop" in their name."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False


def _divide(model: nn.Module, each: _Division, ranks: TensorRanks) -> None:
    module, rule = each.module, each.rule
    if rule.sums_gradient:
        remember_sums(module, None)
    if not each.cuts:
        return
    if rule.experts:
        divide_experts(module, each.cuts, each.path, ranks)
        return
    cut = each.cuts[ranks.rank]
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    assert isinstance(rule.weight, Shard)
    if type(module) is nn.Embedding:
        hold_part(weight, rule.weight.dim, cut, each.path, ranks.data_group)
        module.num_embeddings, module.embedding_dim = whole_shape(weight)
        return
    hold_part(weight, _dim_of(module, rule), cut, each.path, ranks.data_group)
    is_transposed = _is_transposed(module)
    new: nn.Module
    if rule.weight.dim == 0:
        if bias is not None:
            hold_part(bias, 0, cut, each.path, ranks.data_group)
        sizes = tuple(theirs.size for theirs in each.cuts) if rule.gathers else ()
        block = "" if rule.gathers else f"{each.path.rpartition('.')[0]}."
        new = ColumnParallelLinear(weight, bias, ranks, block=block, transposed=is_transposed, gathered_sizes=sizes)
        if cut.shared:
            assert not is_transposed, each.path
            remember_sums(new, cut)
    else:
        new = RowParallelLinear(weight, bias, ranks, transposed=is_transposed)
    model.set_submodule(each.path, new.train(module.training))


def _fix_counts(model: nn.Module, each: _Division, ranks: TensorRanks, *, in_config: bool) -> None:
    """Set the head counts of the attention module around a column-parallel layer to this rank's counts."""
    if not each.cuts or each.rule.along in (Along.FEATURES, Along.KEYS) or each.rule.weight != Shard(0):
        return
    cut = each.cuts[ranks.rank]
    share = cut.share
    assert share is not None
    units = share.num_heads + (2 * share.num_kv_heads if each.rule.along is not Along.QUERIES else 0)
    size = cut.total // units
    changes = {
        **dict.fromkeys(_COUNTS_OF_QUERIES, (share.num_heads, share.num_queries)),
        **dict.fromkeys(_COUNTS_OF_KEYS, (share.num_kv_heads, share.num_keys)),
        **dict.fromkeys(_SIZES_OF_QUERIES, (share.num_heads * size, share.num_queries * size)),
        **dict.fromkeys(_QUERIES_PER_KEY, (share.num_heads // share.num_kv_heads, share.num_queries // share.num_keys)),
    }
    module = model.get_submodule(each.path.rpartition(".")[0])
    _set_counts(module, changes)
    if in_config:
        module.config = copy.copy(module.config)
        _set_counts(module.config, changes)


def _set_counts(module: object, changes: Mapping[str, tuple[int, int]]) -> None:
    """Set attributes to this rank's value if they have the value of the whole model."""
    for name, (whole, own) in changes.items():
        if vars(module).get(name) == whole:
            setattr(module, name, own)


def _divide_per_head(model: nn.Module, divisions: list[_Division], ranks: TensorRanks, *, has_alibi: bool) -> None:
    """Cut and gather what has a value per head, around the modules whose query heads are divided."""
    shares: list[HeadShare] = []
    attention: dict[str, None] = {}
    for each in divisions:
        of_ranks = [cut.share for cut in each.cuts if cut.share is not None]
        if of_ranks and each.rule.weight == Shard(0) and each.rule.along is not Along.KEYS:
            shares, attention[each.path.rpartition(".")[0]] = of_ranks, None
    if shares:
        divide_per_head(model, list(attention), shares, ranks, has_alibi=has_alibi)


def check_first_inputs(model: nn.Module, ranks: TensorRanks) -> None:
    """Compare the inputs of the first forwards between ranks, which must get the same samples.

    The forward raises `ConfigError` on every rank if the inputs differ.
    """
    left = _NUM_CHECKED

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal left
        if left == 0:
            return
        left -= 1
        digests = all_gather_values(_digest([*args, *kwargs.values()]), backend=ranks.backend)
        if any(theirs != digests[0] for theirs in digests):
            other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
            raise ConfigError(
                f"tensor parallelism: ranks 0 and {other} of a group of {ranks.world_size} got different inputs; ranks "
                "that hold the parts of one model need the same samples. Shard the data over the data-parallel ranks "
                "only (engine.mesh.rank('dp') of engine.mesh.size('dp')), with equal seeds on tensor-parallel ranks"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


def _digest(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(values):
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
