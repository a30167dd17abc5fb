"""DeepSpeed's grids of ranks with named axes; `layout_of` converts them to the layout of a mesh.

`ProcessTopology` and its subclasses hold only integers. `PipelineParallelGrid` exposes a `Mesh` under DeepSpeed's
names, and serves as the `mpu` of a pipeline.
"""

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError, counted
from deepspeed.parallel.layout import Layout, grid
from deepspeed.parallel.mesh import Mesh

#: axis of a topology -> axis of the mesh
_MESH_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}


class ProcessTopology:
    """Ranks 0, 1, 2, ... in a grid with named axes; the last axis varies fastest.

        >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
        >>> topology.get_rank(pipe=1, data=0)
        3
        >>> topology.get_axis_comm_lists("pipe")
        [[0, 3], [1, 4], [2, 5]]

    Args:
        axes: the names of the axes, outermost first.
        dims: the number of ranks along each axis.

    Raises:
        ConfigError: `axes` and `dims` differ in length, an axis is given twice, or a size is below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes) or min(self.dims, default=0) < 1:
            raise ConfigError(
                f"ProcessTopology: found axes {self.axes} with sizes {self.dims}; give each axis once, with a size of "
                "1 or more"
            )
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinate
        #: coordinate -> rank
        self.mapping: dict[Any, int] = {
            coordinate(*at): rank for rank, at in enumerate(itertools.product(*self._places()))
        }
        self._coords = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate.

        Args:
            **coord_kwargs: the index along every axis.

        Raises:
            ValueError: an axis is missing or unknown, or the coordinate is outside the grid.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(f"get_rank: found places along {sorted(coord_kwargs)}; give one along each of {self.axes}")
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ValueError(f"get_rank: found {key}; the sizes are {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        """Names of the axes, outermost first."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Format a rank's coordinate for file names, such as "model_01"; axes in `omit_axes` are left out."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Number of ranks along an axis; 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return a rank's coordinate: a named tuple with a field per axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"get_coord: found rank {rank}; the grid has ranks 0 to {len(self._coords) - 1}")
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return every set of ranks that differ only along `axis`, each in order; empty for an unknown axis."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        fixed = itertools.product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, at, strict=True))) for at in fixed]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these indices along the given axes, in order."""
        if unknown := set(filter_kwargs) - set(self.axes):
            raise ValueError(f"filter_match: found the axes {sorted(unknown)}; the grid has {self.axes}")
        wanted = filter_kwargs.items()
        return [
            rank for rank, at in enumerate(self._coords) if all(getattr(at, axis) == place for axis, place in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at index `idx` of an axis, in order."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)

    def _places(self) -> list[range]:
        return [range(size) for size in self.dims]


class PipeDataParallelTopology(ProcessTopology):
    """A grid of stages and data-parallel ranks; stages are outermost, so ranks that average gradients are neighbors."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A grid of stages, data-parallel and tensor-parallel ranks; tensor-parallel ranks are the nearest neighbors."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def layout_of(topology: ProcessTopology) -> Layout:
    """Convert a topology to a mesh layout: pipe is pp, data is dp, model is tp.

    Raises:
        ConfigError: for another axis.
    """
    if unknown := [axis for axis in topology.axes if axis not in _MESH_AXES]:
        raise ConfigError(
            f"topology: found the axis {', '.join(unknown)}; a pipeline knows {', '.join(_MESH_AXES)}, so use "
            "PipeDataParallelTopology or PipeModelDataParallelTopology"
        )
    sizes = {axis: max(1, topology.get_dim(axis)) for axis in _MESH_AXES}
    places = itertools.product(*(range(size) for size in sizes.values()))
    coords = (dict(zip(sizes, at, strict=True)) for at in places)
    ranks = tuple(topology.get_rank(**{axis: at[axis] for axis in topology.axes}) for at in coords)
    return grid(**{_MESH_AXES[axis]: size for axis, size in sizes.items()}, ranks=ranks)


def topology_of(layout: Layout) -> ProcessTopology:
    """Convert a layout with ranks in order to a topology; sequence-parallel ranks count as data."""
    pp, data, tp = layout.size("pp"), layout.size("dp", "sp"), layout.size("tp")
    return PipeDataParallelTopology(pp, data) if tp == 1 else PipeModelDataParallelTopology(pp, tp, data)


@absent_members("runtime.pipe.topology:PipelineParallelGrid")
class PipelineParallelGrid:
    """This rank's place in a pipeline and its groups, under the names of DeepSpeed and Megatron.

    "Slice" means tensor parallelism; "model" means stages and slices together: the ranks that hold one model. Creating
    a grid without `mesh` is a collective of all ranks.

    Args:
        topology: default: all ranks data parallel.
        process_group: for compatibility; the grid is over all ranks.
        mesh: an engine's mesh; the grid uses its groups.

    Raises:
        ConfigError: the topology's number of ranks differs from the world size.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: ProcessGroup | None = None,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        if mesh is None:
            world_size = dist.get_world_size(process_group)
            topology = topology or PipeDataParallelTopology(1, world_size)
            check_world(topology, world_size)
            mesh = Mesh(layout_of(topology))
        self.mesh = mesh
        self._topology = topology or topology_of(mesh.layout)
        self.global_rank = dist.get_rank()
        self.world_size = mesh.size(*mesh.layout.axes)
        self.stage_id = mesh.rank("pp")
        self.data_parallel_id = mesh.rank("dp")
        self.pipe_parallel_size = mesh.size("pp")
        self.data_parallel_size = mesh.size("dp")
        self.slice_parallel_size = mesh.size("tp")
        self.model_parallel_size = mesh.model_size
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

    def topology(self) -> ProcessTopology:
        """The places of all ranks."""
        return self._topology

    def get_stage_id(self) -> int:
        """Number of this rank's stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return which copy of the pipeline this rank is in."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Global rank of the peer of this rank in another stage.

        Args:
            stage_id: number of the stage.
            **kwargs: other indices along further axes of the topology.
        """
        if not kwargs:
            return self.mesh.ranks("pp")[stage_id]
        own = self._topology.get_coord(self.global_rank)._asdict()
        return self._topology.get_rank(**{**own, **kwargs, "pipe": stage_id})

    def get_global_rank(self) -> int:
        """This rank's global rank."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Number of this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """The ranks of one pipeline, by stage."""
        return self.mesh.group("pp")

    def get_data_parallel_rank(self) -> int:
        """Return which copy of the pipeline this rank is in."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Number of copies of the pipeline."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks that hold the same layers and see different samples."""
        return self.mesh.group("dp")

    def get_model_parallel_rank(self) -> int:
        """This rank's index among the ranks that hold one model."""
        return self.mesh.model_rank

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks that hold one model: stages x slices."""
        return self.model_parallel_size

    def get_model_parallel_group(self) -> ProcessGroup:
        """The ranks that hold one model."""
        return self.mesh.group("pp", "tp")

    def get_slice_parallel_rank(self) -> int:
        """This rank's index among the ranks that divide a layer."""
        return self.mesh.rank("tp")

    def get_slice_parallel_world_size(self) -> int:
        """Number of ranks that divide a layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """The ranks that divide a layer."""
        return self.mesh.group("tp")


def check_world(topology: ProcessTopology, world_size: int) -> None:
    """Raise ConfigError if the topology's number of ranks differs from the world size."""
    if topology.world_size() != world_size:
        sizes = " x ".join(f"{axis} {size}" for axis, size in zip(topology.axes, topology.dims, strict=True))
        raise ConfigError(
            f"topology: {sizes} = {topology.world_size()}, but the world has {counted(world_size, 'rank')}; the sizes "
            "must multiply to it"
        )
