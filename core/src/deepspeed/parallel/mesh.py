"""The process groups of a grid of ranks, and torch's `DeviceMesh` over them.

`engine/build.py` makes one `Mesh` per engine, from `mesh_param`, the caller's `mpu` or all ranks; the engine owns it
(`engine.mesh`), and whoever reduces or gathers gets its group from there. `groups.py` is a view of it for libraries.

    mesh.group("tp")                          # this rank's process group along an axis
    mesh["tp"]                                # torch's DeviceMesh, for DTensor and parallelize_module
    mesh["dp_replicate", "dp_shard"]          # the same for fully_shard
    mesh.gradient_group()                     # who averages a gradient
"""

import functools
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.own_group import group_of_members
from deepspeed.parallel.layout import DATA_AXES, Layout, Lines

# By world group, the groups that were made in it: meshes with equal lines share them, and they go with their world.
# The key is every line of the mesh, not only this rank's, so that all ranks of the mesh find a group or none does.
_made: WeakKeyDictionary[ProcessGroup, dict[Lines, ProcessGroup]] = WeakKeyDictionary()


class RankGrid:
    """A layout with process groups: this rank's, along each axis or several axes at once.

    Making it is a collective of all its ranks (of all ranks of the world, if it covers the world).
    """

    def __init__(self, layout: Layout, given: Mapping[tuple[str, ...], ProcessGroup] | None = None) -> None:
        """Make this rank's group along each axis.

        Args:
            layout: the grid; this rank is in it.
            given: groups that exist already, by the axes along which their ranks differ.
        """
        self.layout = layout
        self.world = dist.get_world_group()
        self._global_rank = dist.get_rank()
        self._given = {layout.lines(*axes): group for axes, group in (given or {}).items()}
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}  # libraries ask in every forward
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
        """This rank's place in its group along `axes`."""
        return self.ranks(*axes).index(self._global_rank)

    def group(self, *axes: str) -> ProcessGroup:
        """This rank's group along `axes`: ("tp",), ("dp",), ("dp", "sp") and so on.

        Groups along one axis exist. Another combination is made when it is first asked for, by all ranks of the mesh
        together.
        """
        if axes not in self._groups:
            self._groups[axes] = self._find(self.layout.lines(*axes))
        return self._groups[axes]

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of torch over the same groups, which has one dimension per axis, axes of size 1 included."""
        return DeviceMesh.from_group(
            [self.group(axis) for axis in self.layout.axes],
            _device_type(),
            mesh=torch.tensor(self.layout.ranks).view([size for _, size in self.layout.shape]),
            mesh_dim_names=self.layout.axes,
        )

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return torch's submesh along `axes`, one dimension each; "dp" alone is one dimension over both data axes."""
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
            lines = ((self._global_rank,),)  # needs nobody else, and serves every axis of size 1
        if lines not in made:
            made[lines] = self._make(lines)
        return made[lines]

    def _make(self, lines: Lines) -> ProcessGroup:
        (own,) = (line for line in lines if self._global_rank in line)
        if torch.distributed.get_backend(self.world) != "mpi" or len(lines) * len(own) < self.world.size():
            return group_of_members(own)  # other ranks of the world may be elsewhere
        # With MPI all ranks make all groups, and each keeps its own.
        groups = {line: dist.new_group(line) for line in lines}
        return groups[own]


class Mesh(RankGrid):
    """The mesh of an engine, with the meaning of its axes.

    Axes: see `layout.py`. The definitions that everything else uses:

    - dp: ranks that see different samples (`size("dp")`, `rank("dp")`); batch sizes and data loaders count them.
    - dp x sp: ranks that average a gradient (`gradient_group()`); edp for the parameters of experts.
    """

    def __init__(self, layout: Layout, given: Mapping[tuple[str, ...], ProcessGroup] | None = None) -> None:
        super().__init__(layout, given)
        #: the order of `experts` where its caller asks for none
        self.data_before_expert = False
        self._experts: dict[int, RankGrid] = {}
        self._tied: dict[tuple[int, ...], ProcessGroup] = {}
        for axes in (("dp",), ("dp", "sp"), ("dp_shard", "sp"), ("pp", "tp"), layout.axes):
            self._connect(*axes)

    def gradient_group(self, ep_size: int = 1) -> ProcessGroup:
        """Ranks that hold the same parameter and average its gradient: dp x sp.

        Args:
            ep_size: for a parameter of experts that are divided over that many ranks; then it is edp.
        """
        return self.group("dp", "sp") if ep_size == 1 else self.experts(ep_size).group("edp")

    def shard_group(self, ep_size: int = 1) -> ProcessGroup:
        """Ranks that together hold the shards of one copy: dp_shard x sp, or edp for experts.

        Without `mics_shard_size` and `zero_hpz_partition_size` this is `gradient_group(ep_size)`. With MiCS it is the
        shard group: reduce-scatter in it, then all-reduce the shard in `replicate_group`. With hpZ it holds the second
        copy of the weights; gradients and states are sharded over `gradient_group`.
        """
        return self.group("dp_shard", "sp") if ep_size == 1 else self.gradient_group(ep_size)

    def replicate_group(self, ep_size: int = 1) -> ProcessGroup:
        """Ranks that hold the same shard, one in each copy: dp_replicate. One rank alone if there is one copy, as
        there is of experts."""
        return self.group("dp_replicate") if ep_size == 1 else self.group()

    def tied_group(self, stages: tuple[int, ...]) -> ProcessGroup:
        """The peers of this rank in these stages, which hold copies of a parameter. The first call is a collective of
        them."""
        if stages not in self._tied:
            members = self.ranks("pp")
            is_all = len(stages) == len(members)
            self._tied[stages] = self.group("pp") if is_all else group_of_members([members[at] for at in stages])
        return self._tied[stages]

    @property
    def norm_group(self) -> ProcessGroup:
        """All ranks of the mesh, which agree on norm, overflow and the decision to step.

        A sum over it counts an element once if the axes over which that element is replicated contribute from their
        first rank only. It is the world group if the mesh covers the world.
        """
        return self.group(*self.layout.axes)

    @property
    def model_size(self) -> int:
        """Number of ranks over which one model is divided: pp x tp."""
        return self.size("pp", "tp")

    @property
    def model_rank(self) -> int:
        """The place that this rank has among the ranks of one model."""
        return self.rank("pp", "tp")

    def experts(self, ep_size: int, *, data_before_expert: bool | None = None) -> RankGrid:
        """The ranks of dp x sp laid out again as (edp, ep); axes pp, edp, ep, tp. A collective on the first call.

        Args:
            ep_size: ranks over which the experts are divided; group("ep") is for the all-to-all of tokens,
                group("edp") averages gradients of experts.
            data_before_expert: see `Layout.experts`; counts on the first call with this `ep_size`. None: as the
                attribute of this name says.

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
        """A mesh of the same ranks and groups, with dp divided into dp_replicate x dp_shard; see `Layout.split_data`.

        A collective. Raises `ConfigError` if the size does not fit.
        """
        layout = self.layout.split_data(shard_ranks, asked_by)
        mesh = Mesh(layout, self._groups_along("pp", "dp", "sp", "tp"))
        mesh._experts.update(self._experts)
        return mesh

    def _groups_along(self, *axes: str) -> dict[tuple[str, ...], ProcessGroup]:
        return {along: group for along, group in self._groups.items() if set(along) <= set(axes)}


def _device_type() -> str:
    return str(get_accelerator().device_name())
