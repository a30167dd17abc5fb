"""The process groups of a grid of ranks, and torch's `DeviceMesh` over them.

`engine/build.py` makes one `Mesh` per engine, from `mesh_param`, the caller's `mpu` or all ranks. The engine owns the
mesh (`engine.mesh`); code that reduces or gathers gets its group from there. `groups.py` exposes the mesh to libraries.

    mesh.group("tp")                          # this rank's process group along an axis
    mesh["tp"]                                # torch's DeviceMesh, for DTensor and parallelize_module
    mesh["dp_replicate", "dp_shard"]          # a two-dimensional DeviceMesh for fully_shard
    mesh.gradient_group()                     # the ranks that average a gradient

A caller's model parallel unit (Megatron's `mpu`) has `get_data_parallel_group()`, `..._world_size()` and `..._rank()`,
and the same for other kinds of parallelism under the names below. Its groups need not cover the world: two models may
train on halves of the ranks.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.own_group import group_of_members
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.parallel.layout import DATA_AXES, Layout, Lines, grid

# By world group, the groups that were made in it: meshes with equal lines share groups, and groups die with their
# world. The key has every line of the mesh, not only this rank's, so either all ranks of the mesh find a group or none.
_made: WeakKeyDictionary[ProcessGroup, dict[Lines, ProcessGroup]] = WeakKeyDictionary()


class RankGrid:
    """A layout with this rank's process groups, along one axis or several axes at once.

    The constructor is a collective of all ranks in the layout.
    """

    def __init__(self, layout: Layout, given: Mapping[tuple[str, ...], ProcessGroup] | None = None) -> None:
        """Make this rank's group along each axis.

        Args:
            layout: the grid; it must contain this rank.
            given: existing groups, by the axes along which their ranks differ.
        """
        self.layout = layout
        self.world = dist.get_world_group()
        self._global_rank = dist.get_rank()
        self._given = {layout.lines(*axes): group for axes, group in (given or {}).items()}
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}  # a cache: libraries ask in every forward
        for axis in layout.axes:
            self._connect(axis)

    def size(self, *axes: str) -> int:
        """Number of ranks in this rank's group along `axes`."""
        return self.layout.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of this rank's group along `axes`, in the order of the group."""
        if axes not in self._ranks:
            self._ranks[axes] = self.layout.line(self._global_rank, *axes)
        return self._ranks[axes]

    def rank(self, *axes: str) -> int:
        """This rank's index in its group along `axes`."""
        return self.ranks(*axes).index(self._global_rank)

    def group(self, *axes: str) -> ProcessGroup:
        """This rank's group along `axes`: ("tp",), ("dp",), ("dp", "sp") and so on.

        Groups along one axis exist already. The first call for another combination creates its groups, and all ranks of
        the mesh must make that call together.
        """
        if axes not in self._groups:
            self._groups[axes] = self._find(self.layout.lines(*axes))
        return self._groups[axes]

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        """torch's `DeviceMesh` over the same groups, with one dimension per axis, including axes of size 1."""
        return DeviceMesh.from_group(
            [self.group(axis) for axis in self.layout.axes],
            _device_type(),
            mesh=torch.tensor(self.layout.ranks).view([size for _, size in self.layout.shape]),
            mesh_dim_names=self.layout.axes,
        )

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return torch's submesh with one dimension per axis; "dp" alone is one dimension over both data axes."""
        if axes != "dp":
            return self.device_mesh[axes]
        parts = [axis for axis in DATA_AXES if self.size(axis) > 1]
        if len(parts) == 2:
            return DeviceMesh.from_group(self.group("dp"), _device_type(), mesh_dim_names=("dp",))
        return self.device_mesh[parts[0] if parts else DATA_AXES[-1]]

    def _connect(self, *axes: str) -> None:
        if self.size(*axes) > 1:
            self.group(*axes)

    def _find(self, lines: Lines) -> ProcessGroup:
        if lines in self._given:
            return self._given[lines]
        if len(lines[0]) == self.world.size():
            return self.world
        made = _made.setdefault(self.world, {})
        if len(lines[0]) == 1:
            lines = ((self._global_rank,),)  # needs no other rank, and serves every axis of size 1
        if lines not in made:
            made[lines] = self._make(lines)
        return made[lines]

    def _make(self, lines: Lines) -> ProcessGroup:
        (own,) = (line for line in lines if self._global_rank in line)
        if torch.distributed.get_backend(self.world) != "mpi" or len(lines) * len(own) < self.world.size():
            return group_of_members(own)  # other ranks of the world may be elsewhere
        # With MPI all ranks create all groups, and each rank keeps its own group.
        groups = {line: dist.new_group(line) for line in lines}
        return groups[own]


class Mesh(RankGrid):
    """The mesh of an engine; it defines the meaning of the axes (see `layout.py`):

    - dp: ranks that see different samples (`size("dp")`, `rank("dp")`); batch sizes and data loaders count these ranks.
    - dp x sp: ranks that average a gradient (`gradient_group()`); for the parameters of experts, edp.
    """

    def __init__(self, layout: Layout, given: Mapping[tuple[str, ...], ProcessGroup] | None = None) -> None:
        super().__init__(layout, given)
        #: the default of `data_before_expert` in `experts`
        self.data_before_expert = False
        self._experts: dict[int, RankGrid] = {}
        self._tied: dict[tuple[int, ...], ProcessGroup] = {}
        for axes in (("dp",), ("dp", "sp"), ("dp_shard", "sp"), ("pp", "tp"), layout.axes):
            self._connect(*axes)

    def gradient_group(self, ep_size: int = 1) -> ProcessGroup:
        """Return the group of ranks that hold the same parameter and average its gradient: dp x sp.

        Args:
            ep_size: the number of ranks over which experts are divided, for an expert's parameter; its group is edp.
        """
        return self.group("dp", "sp") if ep_size == 1 else self.experts(ep_size).group("edp")

    def shard_group(self, ep_size: int = 1) -> ProcessGroup:
        """Return the group of ranks that together hold the shards of one copy: dp_shard x sp, or edp for experts.

        Without `mics_shard_size` and `zero_hpz_partition_size` this is `gradient_group(ep_size)`. With MiCS, gradients
        are reduce-scattered in this group, then all-reduced in `replicate_group`. With hpZ, this group holds the second
        copy of the weights, and gradients and states are sharded over `gradient_group`.
        """
        return self.group("dp_shard", "sp") if ep_size == 1 else self.gradient_group(ep_size)

    def replicate_group(self, ep_size: int = 1) -> ProcessGroup:
        """Return the group of ranks that hold the same shard in different copies: dp_replicate. With one copy, which
        experts always have, the group is this rank alone."""
        return self.group("dp_replicate") if ep_size == 1 else self.group()

    def tied_group(self, stages: tuple[int, ...]) -> ProcessGroup:
        """Return the group of this rank's pipeline peers in `stages`, which hold copies of a parameter. Its members
        make the first call together."""
        if stages not in self._tied:
            members = self.ranks("pp")
            is_all = len(stages) == len(members)
            self._tied[stages] = self.group("pp") if is_all else group_of_members([members[at] for at in stages])
        return self._tied[stages]

    @property
    def norm_group(self) -> ProcessGroup:
        """The group of all ranks of the mesh, which agree on norm, overflow and the decision to step.

        To count a replicated element once in a sum over this group, only the first rank along the axes that replicate
        the element contributes it. This is the world group if the mesh covers the world.
        """
        return self.group(*self.layout.axes)

    @property
    def model_size(self) -> int:
        """Number of ranks over which one model is divided: pp x tp."""
        return self.size("pp", "tp")

    @property
    def model_rank(self) -> int:
        """This rank's index among the ranks of one model."""
        return self.rank("pp", "tp")

    def experts(self, ep_size: int, *, data_before_expert: bool | None = None) -> RankGrid:
        """Return the grid with the ranks of dp x sp rearranged as (edp, ep); axes pp, edp, ep, tp. The first call is a
        collective.

        Args:
            ep_size: number of ranks over which the experts are divided; group("edp") averages the gradients of experts.
            data_before_expert: see `Layout.experts`; only the first call with this `ep_size` uses it. None: use the
                attribute of this name.

        Raises:
            ConfigError: if `ep_size` does not divide dp x sp.
        """
        if ep_size not in self._experts:
            order = self.data_before_expert if data_before_expert is None else data_before_expert
            layout = self.layout.experts(ep_size, data_before_expert=order)
            self._experts[ep_size] = RankGrid(layout, self._groups_along("pp", "tp"))
        return self._experts[ep_size]

    @property
    def expert_grids(self) -> Mapping[int, RankGrid]:
        """The grids that `experts` has made, by expert parallel size."""
        return self._experts

    def split_data(self, shard_ranks: int, asked_by: str) -> "Mesh":
        """Return a mesh of the same ranks and groups, with dp split into dp_replicate x dp_shard; a collective.

        See `Layout.split_data`. Raises `ConfigError` if the size does not fit.
        """
        layout = self.layout.split_data(shard_ranks, asked_by)
        mesh = Mesh(layout, self._groups_along("pp", "dp", "sp", "tp"))
        mesh._experts.update(self._experts)
        return mesh

    def _groups_along(self, *axes: str) -> dict[tuple[str, ...], ProcessGroup]:
        return {along: group for along, group in self._groups.items() if set(along) <= set(axes)}


def _device_type() -> str:
    return str(get_accelerator().device_name())


#: by axis, the names that libraries use: get_<name>_group(), get_<name>_world_size(), get_<name>_rank()
_NAMES = {
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "dp": ("data_parallel",),
    "sp": ("sequence_parallel", "context_parallel"),
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}


class _Axis(NamedTuple):
    """One kind of parallelism of an mpu."""

    size: int
    rank: int
    group: ProcessGroup | None


def mesh_of_mpu(mpu: Any) -> Mesh:
    """Return the mesh for `initialize(mpu=...)`. A collective of all ranks that the mpu's groups connect.

    Raises:
        ConfigError: if a method is missing, or the methods contradict each other; the error names them.
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
    group = dist.get_world_group() if group is None else group  # None means the world, as in torch
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
    """Build the grid from the places that all connected ranks report."""
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
    """Gather the values of all ranks that `groups` connect, without duplicates."""
    for group in groups:
        gathered = [value for theirs in all_gather_values(values, group) for value in theirs]
        values = [value for place, value in enumerate(gathered) if value not in gathered[:place]]
    return values


def _contradiction(members: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> str | None:
    """Describe why the members do not form a grid; None if they do."""
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
    """Describe a group with other ranks than the layout has along its axis; None if there is none."""
    rank = dist.get_rank()
    for axis, each in found.items():
        if each.group is None:
            continue
        has, wanted = dist.get_all_ranks_from_group(each.group), list(layout.line(rank, axis))
        if has != wanted:
            return f"has the {axis} group {has} on rank {rank}, but by their places the ranks of it are {wanted}"
    return None
