"""The functions of this file say which ranges of a weight a rank holds, and mark its parameters so.

The first of them spread heads, features and vocabulary tokens over tensor-parallel ranks, in integers. Sizes need not
be multiples of the number of ranks: the first ranks hold one more. A head is never divided. A `Cut` says the ranges by
what lies along the divided dim of the weight; `along_of` reads from the model what lies there, where no table says it.

Marks, and hooks that sum gradients, belong to a parameter, and a copy of the model, or its move to some devices, makes
new parameters. So the modules remember them, and `mark_params` puts them on the current ones: after the division, and
when an engine is built.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Module, Parameter

from deepspeed.errors import ConfigError, counted
from deepspeed.parallel.model_part import (
    ModelPart,
    is_sharded,
    mark_counted,
    mark_part,
    part_held,
    reshard,
    whole_shape,
)
from deepspeed.tensor_parallel.plans import Along, Rule, heads_of_model
from deepspeed.tensor_parallel.ranks import TensorRanks

#: [start, stop) along the divided dim of a whole parameter
Range = tuple[int, int]


def spread(total: int, parts: int, grain: int = 1) -> list[Range]:
    """`total` elements in `parts` neighboring ranges, as even as possible.

    Args:
        grain: ranges begin at multiples of this.

    >>> spread(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    >>> spread(10, 2, grain=4)
    [(0, 8), (8, 10)]
    """
    blocks = -(-total // grain)
    cuts = [min(total, grain * (part * (blocks // parts) + min(part, blocks % parts))) for part in range(parts + 1)]
    return [(cuts[part], cuts[part + 1]) for part in range(parts)]


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank.

    Args:
        num_heads: query heads of the whole layer.
        num_kv_heads: key and value heads of the whole layer; each serves `num_heads / num_kv_heads` query heads.
        queries: query heads that this rank holds.
        keys: key and value heads that it holds: those of its query heads.
        is_crowded: there are fewer key and value heads than ranks, so that several ranks may hold the same one.
        counts_keys: no earlier rank holds them.
    """

    num_heads: int
    num_kv_heads: int
    queries: Range
    keys: Range
    is_crowded: bool = False
    counts_keys: bool = True

    @property
    def num_queries(self) -> int:
        """Query heads of this rank."""
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        """Key and value heads of this rank."""
        return self.keys[1] - self.keys[0]


def share_heads(num_heads: int, num_kv_heads: int, num_ranks: int, where: str) -> list[HeadShare]:
    """The heads of each rank.

    Key and value heads are spread over the ranks, each with its query heads. Where there are fewer of them than ranks,
    the ranks are spread over them instead, and those of one key and value head divide its query heads.

    Args:
        where: the layer, for the error.

    Raises:
        ConfigError: if a rank would have no head.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{where}: found {counted(num_heads, 'query head')} and {num_kv_heads} key and value heads; the first must "
            "be a multiple of the second"
        )
    queries_per_key = num_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        ranges = spread(num_kv_heads, num_ranks)
        return [
            HeadShare(num_heads, num_kv_heads, (a * queries_per_key, b * queries_per_key), (a, b)) for a, b in ranges
        ]
    crowd = -(-num_ranks // num_kv_heads)
    if queries_per_key < crowd:
        raise ConfigError(
            f"{where}: found {counted(num_heads, 'query head')} and {num_kv_heads} key and value heads for tensor "
            f"parallelism over {counted(num_ranks, 'rank')}, which leaves {counted(crowd, 'rank')} to "
            f"{counted(queries_per_key, 'query head')} of one key head; use at most "
            f"{counted(num_kv_heads * queries_per_key, 'rank')}"
        )
    shares = []
    for key, (first, stop) in enumerate(spread(num_ranks, num_kv_heads)):
        for place, (a, b) in enumerate(spread(queries_per_key, stop - first)):
            queries = key * queries_per_key + a, key * queries_per_key + b
            keys = (key, key + 1)
            shares.append(HeadShare(num_heads, num_kv_heads, queries, keys, is_crowded=True, counts_keys=place == 0))
    return shares


def scaled(ranges: Sequence[Range], size: int, offset: int = 0) -> tuple[Range, ...]:
    """Ranges of heads as ranges of elements: `size` elements each, the first of them at `offset`."""
    return tuple((offset + start * size, offset + stop * size) for start, stop in ranges)


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


_PARTS = "ds_parts"
_SUMS = "ds_gradient_sums"
_HANDLE = "ds_gradient_sum_handle"


def remember_sums(
    module: Module, cut: Cut | None, names: Sequence[str] | None = None, *, only_where_divided: bool = False
) -> None:
    """Have the gradients of the module's own parameters summed over the ranks, each of which sees a part.

    Args:
        cut: only those of its last `cut.shared` rows, which are one key head, and its value head where both are fused;
            None: all.
        names: of the parameters; None: all.
        only_where_divided: only in forwards that divide the sequence.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)] if names is None else names
    setattr(module, _SUMS, dict.fromkeys(names, (cut, only_where_divided)))


def remember_parts(model: Module) -> None:
    """Keep the marks of all parameters."""
    for module in model.modules():
        marked = ((name, part_held(param)) for name, param in module.named_parameters(recurse=False))
        if parts := {name: part for name, part in marked if part is not None}:
            setattr(module, _PARTS, parts)


def mark_params(model: Module, ranks: TensorRanks) -> None:
    """Mark the parameters, and hook those whose gradients are summed."""
    for module in model.modules():
        for name, part in getattr(module, _PARTS, {}).items():
            mark_part(module.get_parameter(name), part)
        for name, (cut, only_where_divided) in getattr(module, _SUMS, {}).items():
            param = module.get_parameter(name)
            known = getattr(param, _HANDLE, None)
            if known is not None:
                known.remove()
            setattr(param, _HANDLE, param.register_hook(_sum_of(cut, ranks, only_where_divided)))
            if cut is not None and cut.share is not None and not cut.share.counts_keys:
                num_rows, *rest = whole_shape(param)
                mark_counted(param, (num_rows - cut.shared) * math.prod(rest))


def _sum_of(cut: Cut | None, ranks: TensorRanks, only_where_divided: bool) -> Callable[[Tensor], Tensor]:
    def sum_all(grad: Tensor) -> Tensor:
        if only_where_divided and not ranks.sequence_is_divided:
            return grad
        return ranks.sum_in_place(grad.clone(memory_format=torch.contiguous_format))

    def sum_shared(grad: Tensor) -> Tensor:
        """Sum the last rows over the ranks, for all key heads at once: the ranks that share a head are no group."""
        assert cut is not None
        assert cut.share is not None
        rows = grad[grad.shape[0] - cut.shared :]
        of_all = rows.new_zeros((cut.share.num_kv_heads, *rows.shape))
        of_all[cut.share.keys[0]] = rows
        grad = grad.clone()
        grad[grad.shape[0] - cut.shared :] = ranks.sum_in_place(of_all)[cut.share.keys[0]]
        return grad

    return sum_all if cut is None else sum_shared
