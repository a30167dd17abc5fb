"""These functions compute which ranges of a weight a rank holds, and mark its parameters.

`spread` and `share_heads` spread heads, features and vocabulary tokens over tensor-parallel ranks. Sizes need not be
multiples of the number of ranks: the first ranks hold more. A head is never divided. A `Cut` has the ranges of one
rank along the divided dim; `along_of` determines the contents of that dim if no table has them.

Marks, and hooks that sum gradients, belong to a parameter. Copying the model, or moving it to some devices, makes new
parameters. So the modules remember marks and hooks, and `mark_params` sets them on the current parameters: after the
division, and when an engine is built.
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
    """Split `total` elements into `parts` consecutive ranges, as evenly as possible.

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
        keys: key and value heads that this rank holds, which serve its query heads.
        is_crowded: there are fewer key and value heads than ranks, so several ranks may hold the same key head.
        counts_keys: no earlier rank holds the same key heads.
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
    """Return the heads of each rank.

    Key and value heads are spread over the ranks, each with its query heads. If there are fewer key heads than ranks,
    the ranks are spread over the key heads instead, and the ranks of one key head divide its query heads.

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
    """Convert ranges of heads to ranges of elements: `size` elements per head, head 0 begins at `offset`."""
    return tuple((offset + start * size, offset + stop * size) for start, stop in ranges)


@dataclass(frozen=True)
class Cut:
    """`Cut` holds the elements of a dim that one rank holds.

    Args:
        total: elements of the whole dim.
        ranges: the elements that this rank holds.
        shared: number of last elements that other ranks may hold, too, if there are fewer key heads than ranks.
        share: the rank's heads, if the dim has heads.
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
    """Cut a dim of `total` elements. Returns the cut of each rank.

    Args:
        where: path of the module, for errors.
        shares: the heads of each rank; (): the model has no heads.
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
    """Cut a dim of heads for one rank. `size`: the elements per head."""
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
    """Keep this rank's part of a whole parameter, in place, so optimizers and tied weights stay valid.

    Args:
        data_group: the ranks that hold the same part; a sharded parameter is sharded over them.

    Raises:
        ConfigError: if the parameter is tied and was already divided in another way.
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
    """Return "query", "key", "fused" or "" for the last name of a module's path, by the usual names in attention."""
    last = name.rpartition(".")[2].lower()
    return "query" if last in _QUERY_NAMES else "key" if last in _KEY_NAMES else "fused" if last in _FUSED_NAMES else ""


def along_of(model: nn.Module, path: str, placement: Placement) -> Along:
    """Return the heads for attention layers, if the model's config has their numbers; else features.

    A column-parallel layer is recognized by its name, a row-parallel layer by a query layer in the same module.
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
    """Let `mark_params` add hooks that sum gradients of the module's own parameters over the ranks.

    Args:
        cut: sum only the last `cut.shared` rows, which are one key head, and its value head if both are fused; None:
            all rows.
        names: names of the parameters; None: all.
        only_where_divided: sum only if the forward divided the sequence.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)] if names is None else names
    setattr(module, _SUMS, dict.fromkeys(names, (cut, only_where_divided)))


def remember_parts(model: Module) -> None:
    """Store the marks of all parameters in their modules."""
    for module in model.modules():
        marked = ((name, part_held(param)) for name, param in module.named_parameters(recurse=False))
        if parts := {name: part for name, part in marked if part is not None}:
            setattr(module, _PARTS, parts)


def mark_params(model: Module, ranks: TensorRanks) -> None:
    """Set the stored marks on the current parameters, and the hooks that sum gradients."""
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
        """Sum the last rows over all ranks, for all key heads at once: ranks that share a head have no own group."""
        assert cut is not None
        assert cut.share is not None
        rows = grad[grad.shape[0] - cut.shared :]
        of_all = rows.new_zeros((cut.share.num_kv_heads, *rows.shape))
        of_all[cut.share.keys[0]] = rows
        grad = grad.clone()
        grad[grad.shape[0] - cut.shared :] = ranks.sum_in_place(of_all)[cut.share.keys[0]]
        return grad

    return sum_all if cut is None else sum_shared
