"""A cut says which ranges of a weight a rank holds, by what lies along the divided dim of the weight.

`along_of` reads from the model what lies there, where no table says it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

from deepspeed.errors import ConfigError, counted
from deepspeed.parallel.model_part import ModelPart, mark_part, part_held
from deepspeed.parallel.sharded_params import is_sharded, reshard, whole_shape
from deepspeed.tensor_parallel.plans import Along, Rule, heads_of_model
from deepspeed.tensor_parallel.shares import HeadShare, Range, scaled, spread


@dataclass(frozen=True)
class Cut:
    """A `Cut` says which elements of a dim one rank holds.

    Args:
        total: elements of the whole dim.
        ranges: the elements that this rank holds.
        shared: this many of the last elements may be on other ranks, too: key and value heads fewer than ranks.
        share: of the heads, where the dim has heads.
    """

    total: int
    ranges: tuple[Range, ...]
    shared: int = 0
    share: HeadShare | None = None

    @property
    def size(self) -> int:
        """The number of elements that this rank holds."""
        return sum(stop - start for start, stop in self.ranges)


def cut_dim(
    rule: Rule, total: int, where: str, shares: Sequence[HeadShare], *, num_ranks: int, grain: int
) -> list[Cut]:
    """Cut a dim of `total` elements: return for each rank what it holds.

    Args:
        where: path of the module, for errors.
        shares: the heads of each rank; (): the model has none.
        grain: features are cut at multiples of this.

    Raises:
        ConfigError: if a rank would hold nothing, or the elements do not divide into heads.
    """
    if rule.along is Along.FEATURES:
        return _cut_features(rule, total, where, num_ranks=num_ranks, grain=grain)
    if not shares:
        raise ConfigError(f"{where}: its plan divides {rule.along.value}, but model.config has no number of heads")
    num_heads, num_kv_heads = shares[0].num_heads, shares[0].num_kv_heads
    units = {Along.QUERIES: num_heads, Along.KEYS: num_kv_heads}.get(rule.along, num_heads + 2 * num_kv_heads)
    if total % units:
        raise ConfigError(
            f"{where}: found {counted(total, 'feature')} along the divided dim, which are not {units} heads of equal "
            f"size ({counted(num_heads, 'query head')}, {counted(num_kv_heads, 'key head')} and as many value heads, "
            f"of which it has {rule.along.value})"
        )
    return [_cut_heads(rule.along, share, total, total // units) for share in shares]


def _cut_features(rule: Rule, total: int, where: str, *, num_ranks: int, grain: int) -> list[Cut]:
    blocks = (total // rule.blocks,) * rule.blocks if isinstance(rule.blocks, int) else rule.blocks
    if sum(blocks) != total:
        raise ConfigError(
            f"{where}: found {counted(total, 'feature')}, which are not the blocks {rule.blocks} of its plan"
        )
    if min(blocks) < num_ranks * grain - (grain - 1):
        raise ConfigError(
            f"{where}: found {counted(min(blocks), 'feature')} to divide over {num_ranks} tensor-parallel ranks in "
            f"multiples of {grain}; use at most {counted(-(-min(blocks) // grain), 'rank')}, or a plan that keeps this "
            "layer whole"
        )
    ranges: list[list[Range]] = [[] for _ in range(num_ranks)]
    start = 0
    for size in blocks:
        for rank, (a, b) in enumerate(spread(size, num_ranks, grain)):
            ranges[rank].append((start + a, start + b))
        start += size
    return [Cut(total, tuple(theirs)) for theirs in ranges]


def _cut_heads(along: Along, share: HeadShare, total: int, size: int) -> Cut:
    """`size`: of a head."""
    shared = 2 * share.num_keys * size if share.is_crowded else 0
    if along is Along.QUERIES:
        return Cut(total, scaled([share.queries], size), 0, share)
    if along is Along.KEYS:
        return Cut(total, scaled([share.keys], size), shared // 2, share)
    if along is Along.QKV_BLOCKS:
        keys_at, values_at = share.num_heads * size, (share.num_heads + share.num_kv_heads) * size
        keys, values = scaled([share.keys], size, keys_at), scaled([share.keys], size, values_at)
        return Cut(total, (*scaled([share.queries], size), *keys, *values), shared, share)
    per_key = share.num_heads // share.num_kv_heads
    if not share.is_crowded:
        return Cut(total, scaled([share.keys], (per_key + 2) * size), 0, share)
    group_at = share.keys[0] * (per_key + 2) * size
    first = share.keys[0] * per_key
    queries = (share.queries[0] - first, share.queries[1] - first)
    return Cut(total, scaled([queries, (per_key, per_key + 2)], size, group_at), shared, share)


def hold_part(param: Parameter, dim: int, cut: Cut, where: str, data_group: ProcessGroup) -> None:
    """Keep this rank's part of a whole parameter, in place, so that optimizers and tied weights keep the parameter.

    Args:
        data_group: holds the same part, over which that of a sharded parameter is sharded.

    Raises:
        ConfigError: if it is tied to a parameter that was divided in another way.
    """
    known = part_held(param)
    part = ModelPart(known.shape if known else whole_shape(param), dim, cut.ranges)
    if known is not None:
        if (known.shape, known.dim, known.ranges) != (part.shape, part.dim, part.ranges):
            raise ConfigError(
                f"{where}: its weight is tied to another layer's, which holds the ranges {known.ranges} of dim "
                f"{known.dim}, and its own plan says {part.ranges} of dim {part.dim}; divide both alike or neither"
            )
        return
    with torch.no_grad():
        param.grad = None
        if is_sharded(param):
            reshard(param, part.take, data_group)
        else:
            param.data = part.take(param.data).clone()
    mark_part(param, part)


_KEY_NAMES = ("k", "v", "key", "value", "k_proj", "v_proj", "k_lin", "v_lin", "key_proj", "value_proj", "wk", "wv")
_QUERY_NAMES = ("q", "query", "q_proj", "q_lin", "query_proj", "wq")
_FUSED_NAMES = ("qkv", "qkv_proj", "query_key_value", "c_attn", "wqkv", "in_proj")


def role_of(name: str) -> str:
    """ "query", "key", "fused" or "" by the last name of a module's path, as models name the layers of attention."""
    last = name.rpartition(".")[2].lower()
    return "query" if last in _QUERY_NAMES else "key" if last in _KEY_NAMES else "fused" if last in _FUSED_NAMES else ""


def along_of(model: nn.Module, path: str, placement: Placement) -> Along:
    """Heads for the layers of attention, if the model's config has their numbers; else features.

    A column-parallel layer is told by its name, a row-parallel one by a query layer in the module around it.
    """
    if heads_of_model(model) is None:
        return Along.FEATURES
    role = role_of(path)
    if placement == Shard(0):
        return {"query": Along.QUERIES, "key": Along.KEYS}.get(role, Along.FEATURES)
    parent = model.get_submodule(path.rpartition(".")[0])
    layer: Any = model.get_submodule(path)
    for name, child in parent.named_children():
        if role_of(name) == "query" and getattr(child, "out_features", None) == getattr(layer, "in_features", 0):
            return Along.QUERIES
    return Along.FEATURES
