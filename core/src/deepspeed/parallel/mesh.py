"""The axes in which ranks are laid out, and one process group per line along each axis.

`engine/build.py` makes one `Mesh` per world from `mesh_param` or the config; `groups.py` answers from it. An axis of
size 1 needs no group of its own: it is the rank alone.

Axes, the outermost first: pp pipeline stages, dp data parallel, sp sequence parallel, tp tensor parallel. Ranks next
to each other differ in tp, so the heaviest traffic stays on one machine. ep (experts) divides dp further and is not
an axis of the layout; its groups are made by `moe`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.errors import ConfigError

AXES = ("pp", "dp", "sp", "tp")

# Names under which users give an axis, DeepSpeed's mesh_param among them
_ALIASES = {
    "data_parallel": "dp",
    "sequence_parallel": "sp",
    "tensor_parallel": "tp",
    "model_parallel": "tp",
    "mp": "tp",
    "pipe_parallel": "pp",
    "pipeline_parallel": "pp",
    "pipe": "pp",
    "data": "dp",
    "model": "tp",
}


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis; their product is the world size."""

    dp: int = 1
    sp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        """The product of the axes."""
        return self.dp * self.sp * self.tp * self.pp

    def of(self, axis: str) -> int:
        """Ranks along `axis`."""
        return int(getattr(self, axis))


def read_sizes(param: object, world_size: int) -> MeshSizes:
    """Sizes from what the user gave as `mesh_param`, checked against the world.

    A pair is (data parallel, sequence parallel), as DeepSpeed's `initialize(mesh_param=...)` has it; a mapping names
    axes ("dp" or "data_parallel", ...), and a dp that is left out takes the ranks that remain; None is all dp.
    """
    if param is None:
        return MeshSizes(dp=world_size)
    if isinstance(param, MeshSizes):
        sizes = param
    elif isinstance(param, Mapping):
        sizes = _from_mapping(param, world_size)
    elif isinstance(param, tuple | list) and len(param) == 2 and all(_is_size(size) for size in param):
        sizes = MeshSizes(dp=param[0], sp=param[1])
    else:
        raise ConfigError(
            f"mesh_param: expected (data_parallel, sequence_parallel) or a mapping of axes to sizes, found {param!r}"
        )
    if sizes.world_size != world_size:
        raise ConfigError(
            f"mesh_param: {' x '.join(f'{axis} {sizes.of(axis)}' for axis in AXES)} = {sizes.world_size}, but the world"
            f" has {world_size} ranks; the sizes must multiply to it"
        )
    return sizes


def rank_lines(sizes: MeshSizes, axes: tuple[str, ...]) -> list[list[int]]:
    """Every set of global ranks that differ only in `axes`, each in rank order; together they are the world."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= sizes.of(axis)
    lines: dict[int, list[int]] = {}
    for rank in range(sizes.world_size):
        # The first rank of the line: ours with 0 in each of the axes.
        first = rank - sum((rank // strides[axis] % sizes.of(axis)) * strides[axis] for axis in axes)
        lines.setdefault(first, []).append(rank)
    return list(lines.values())


class Mesh:
    """The groups of this rank along each axis, or several axes at once; made when they are first asked for.

    Every rank must ask for the same axes in the same order, because making a group is a collective; a group of one
    rank is not.
    """

    def __init__(self, sizes: MeshSizes) -> None:
        self.sizes = sizes
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}

    def size(self, *axes: str) -> int:
        """Ranks in this rank's group along `axes`."""
        return math.prod(self.sizes.of(axis) for axis in axes)

    def group(self, *axes: str) -> ProcessGroup:
        """This rank's group along `axes`, ("dp",) or ("dp", "sp") and so on."""
        key = tuple(sorted(axes, key=AXES.index))
        if key not in self._groups:
            self._groups[key] = self._make(key)
        return self._groups[key]

    def rank(self, *axes: str) -> int:
        """This rank's place in its group along `axes`."""
        line = next(line for line in rank_lines(self.sizes, axes) if dist.get_rank() in line)
        return line.index(dist.get_rank())

    def _make(self, axes: tuple[str, ...]) -> ProcessGroup:
        if self.size(*axes) == self.sizes.world_size:
            return dist.get_world_group()
        if self.size(*axes) == 1:
            return dist.new_group([dist.get_rank()], use_local_synchronization=True)
        # All ranks make all groups, as torch requires, and each keeps the one it is in.
        own = None
        for line in rank_lines(self.sizes, axes):
            group = dist.new_group(line)
            if dist.get_rank() in line:
                own = group
        assert own is not None, "the lines of a mesh cover the world"
        return own


def _from_mapping(param: Mapping[str, object], world_size: int) -> MeshSizes:
    given: dict[str, int] = {}
    for name, size in param.items():
        axis = _ALIASES.get(name, name)
        if axis not in AXES:
            raise ConfigError(f"mesh_param.{name}: no such axis; the axes are {', '.join(AXES)}")
        if not _is_size(size):
            raise ConfigError(f"mesh_param.{name}: expected a positive integer, found {size!r}")
        if axis in given:
            raise ConfigError(f"mesh_param.{name}: the axis {axis} is given twice")
        given[axis] = size  # type: ignore[assignment]
    if "dp" not in given:
        given["dp"] = max(1, world_size // math.prod(given.values()))
    return MeshSizes(**given)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
