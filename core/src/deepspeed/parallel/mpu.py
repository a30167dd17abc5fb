"""A caller's model parallel unit (Megatron's `mpu`), read into a layout and the groups it has.

An mpu has `get_data_parallel_group()`, `..._world_size()` and `..._rank()`, and the same for other kinds of
parallelism under the names below. Its groups need not cover the world: two models may train on halves of the ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.parallel.layout import Layout, grid
from deepspeed.parallel.mesh import Mesh

#: by axis, the names that libraries use: get_<name>_group(), get_<name>_world_size(), get_<name>_rank()
_NAMES = {
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "dp": ("data_parallel",),
    "sp": ("sequence_parallel", "context_parallel"),
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}


class _Axis(NamedTuple):
    """One kind of parallelism as an mpu has it."""

    size: int
    rank: int
    group: ProcessGroup | None


def mesh_of_mpu(mpu: Any) -> Mesh:
    """The mesh that `initialize(mpu=...)` asks for. A collective of all ranks that the mpu's groups connect.

    Raises:
        ConfigError: if a method is absent, or the answers contradict each other; it names the method.
    """
    found = {axis: _read_axis(mpu, axis, names) for axis, names in _NAMES.items()}
    layout = _lay_out(mpu, found)
    return Mesh(layout, {(axis,): each.group for axis, each in found.items() if each.group is not None})


def _read_axis(mpu: Any, axis: str, names: Sequence[str]) -> _Axis:
    has = [name for name in names if callable(getattr(mpu, f"get_{name}_world_size", None))]
    if not has and axis != "dp":
        return _Axis(1, 0, None)
    name = has[0] if has else names[0]
    size = int(_call(mpu, f"get_{name}_world_size"))
    if size == 1 and axis != "dp":
        return _Axis(1, 0, None)
    group = _call(mpu, f"get_{name}_group")
    group = dist.get_world_group() if group is None else group  # as torch reads it
    ranks = dist.get_all_ranks_from_group(group)
    rank = int(_call(mpu, f"get_{name}_rank"))
    if len(ranks) != size or ranks[rank : rank + 1] != [dist.get_rank()]:
        raise ConfigError(
            f"mpu: {type(mpu).__name__}.get_{name}_world_size() is {size} and get_{name}_rank() is {rank} on global "
            f"rank {dist.get_rank()}, but get_{name}_group() has the ranks {ranks}; the three must agree"
        )
    return _Axis(size, rank, group)


def _call(mpu: Any, method: str) -> Any:
    if not callable(getattr(mpu, method, None)):
        raise ConfigError(f"mpu: {type(mpu).__name__} has no method {method}(); initialize(mpu=...) needs it")
    return getattr(mpu, method)()


def _lay_out(mpu: Any, found: Mapping[str, _Axis]) -> Layout:
    """The grid, from what every connected rank says about its own place in it."""
    groups = [each.group for each in found.values() if each.group is not None]
    sizes = {axis: each.size for axis, each in found.items()}
    own = {"rank": dist.get_rank(), "sizes": sizes, "at": [each.rank for each in found.values()]}
    members = sorted(_gather([own], groups), key=lambda member: member["at"])
    problem = _contradiction(members, sizes)
    layout = None if problem else grid(**sizes, ranks=tuple(member["rank"] for member in members))
    if layout is not None:
        problem = _misplaced(layout, found)
    problems = [each for each in _gather([problem], groups) if each]  # raised on all ranks or on none
    if problems:
        raise ConfigError(f"mpu: {type(mpu).__name__} {problems[0]}")
    assert layout is not None
    return layout


def _gather(values: list[Any], groups: Iterable[ProcessGroup]) -> list[Any]:
    """The values of all ranks that `groups` connect, each once."""
    for group in groups:
        gathered = [value for theirs in all_gather_values(values, group) for value in theirs]
        values = [value for place, value in enumerate(gathered) if value not in gathered[:place]]
    return values


def _contradiction(members: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> str | None:
    """Return why the members are no grid; None if they are one."""
    by_sizes = {str(member["sizes"]): member["rank"] for member in members}
    if len(by_sizes) > 1:
        return "has different sizes on different ranks: " + ", ".join(
            f"{theirs} on rank {rank}" for theirs, rank in by_sizes.items()
        )
    places = {tuple(member["at"]) for member in members}
    if not len(places) == len(members) == math.prod(sizes.values()):
        return (
            f"has the sizes {sizes}, which multiply to {math.prod(sizes.values())}, but its groups connect the ranks "
            f"{sorted(member['rank'] for member in members)}, which have {len(places)} different places"
        )
    return None


def _misplaced(layout: Layout, found: Mapping[str, _Axis]) -> str | None:
    """Return which group has other ranks than the places of its members say; None if no group has."""
    rank = dist.get_rank()
    for axis, each in found.items():
        if each.group is None:
            continue
        has, wanted = dist.get_all_ranks_from_group(each.group), list(layout.line(rank, axis))
        if has != wanted:
            return f"has the {axis} group {has} on rank {rank}, but by their places the ranks of it are {wanted}"
    return None
