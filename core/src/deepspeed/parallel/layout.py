"""The grid of ranks: its axes, their sizes, and its lines, which are sets of ranks that differ only along some axes.

Axes, outermost first: pp (pipeline stages), dp_replicate and dp_shard (data), sp (sequence), tp (tensor). Neighboring
ranks differ in tp, so the heaviest traffic stays on one machine. `mesh.py` creates process groups from the lines.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.errors import ConfigError, counted, either

#: ranks along these axes see different samples; "dp" means both axes
DATA_AXES = ("dp_replicate", "dp_shard")
AXES = ("pp", *DATA_AXES, "sp", "tp")

#: other names of axes in `mesh_param`
_ALIASES = {
    "data_parallel": "dp",
    "data": "dp",
    "sequence_parallel": "sp",
    "tensor_parallel": "tp",
    "model_parallel": "tp",
    "model": "tp",
    "mp": "tp",
    "pipeline_parallel": "pp",
    "pipe_parallel": "pp",
    "pipe": "pp",
}
_GIVEN_AXES = ("pp", "dp", "sp", "tp")

Lines = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """`Layout` arranges global ranks in a grid.

    shape: (axis, number of ranks along it) for every axis, outermost first.
    ranks: the global ranks in row-major order: the last axis varies fastest.
    """

    shape: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert math.prod(size for _, size in self.shape) == len(set(self.ranks)) == len(self.ranks), self

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(axis for axis, _ in self.shape)

    def size(self, *axes: str) -> int:
        """Number of ranks that differ only along `axes`; "dp" means both data axes."""
        sizes = dict(self.shape)
        return math.prod(sizes[axis] for axis in self._single(axes))

    def lines(self, *axes: str) -> Lines:
        """Return every set of ranks that differ only along `axes`, each in rank order. The sets cover all ranks."""
        free = self._single(axes)
        lines: dict[tuple[int, ...], list[int]] = {}
        for place, rank in enumerate(self.ranks):
            fixed = zip(self.axes, self._coordinates(place), strict=True)
            lines.setdefault(tuple(at for axis, at in fixed if axis not in free), []).append(rank)
        return tuple(tuple(sorted(line)) for line in lines.values())

    def line(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the line of `lines(*axes)` that contains global rank `rank`."""
        return next(line for line in self.lines(*axes) if rank in line)

    def split_data(self, shard_ranks: int, asked_by: str) -> "Layout":
        """Return the same grid with dp divided into dp_replicate x dp_shard.

        Args:
            shard_ranks: number of neighboring ranks that hold the shards of one copy: dp_shard x sp.
            asked_by: the config key, for the error.

        Raises:
            ConfigError: if `shard_ranks` is not sp times a divisor of dp.
        """
        dp, sp = self.size("dp"), self.size("sp")
        if shard_ranks % sp or dp % (shard_ranks // sp):
            allowed = either(sp * ranks for ranks in range(1, dp + 1) if dp % ranks == 0)
            raise ConfigError(
                f"{asked_by}: found {shard_ranks}, but there are dp {dp} x sp {sp} ranks, which divide evenly into "
                f"groups of {allowed}; give one of these sizes"
            )
        sizes = {axis: self.size(axis) for axis in ("pp", "sp", "tp")}
        return grid(dp=dp, shard=shard_ranks // sp, **sizes, ranks=self.ranks)

    def experts(self, ep_size: int, *, data_before_expert: bool = False) -> "Layout":
        """Return a layout with the ranks of dp x sp rearranged as (edp, ep); pp and tp stay.

        Args:
            ep_size: number of ranks over which the experts are divided: neighbors along dp x sp.
            data_before_expert: use (ep, edp), so that replicas of an expert are neighbors instead.

        Raises:
            ConfigError: if `ep_size` does not divide dp x sp.
        """
        num_ranks = self.size("dp", "sp")
        if ep_size < 1 or num_ranks % ep_size:
            raise ConfigError(
                f"expert parallel size: found {ep_size}, but dp x sp has {num_ranks} ranks; give a divisor of it"
            )
        inner = [("edp", num_ranks // ep_size), ("ep", ep_size)]
        if data_before_expert:
            inner.reverse()
        return Layout((("pp", self.size("pp")), *inner, ("tp", self.size("tp"))), self.ranks)

    def _single(self, axes: tuple[str, ...]) -> set[str]:
        single = {part for axis in axes for part in (DATA_AXES if axis == "dp" else (axis,))}
        if unknown := single - set(self.axes):
            raise ValueError(f"mesh: asked for the axis {', '.join(sorted(unknown))}; it has {', '.join(self.axes)}")
        return single

    def _coordinates(self, place: int) -> list[int]:
        at = []
        for _, size in reversed(self.shape):
            place, coordinate = divmod(place, size)
            at.append(coordinate)
        return at[::-1]


def grid(
    *,
    dp: int = 1,
    sp: int = 1,
    tp: int = 1,
    pp: int = 1,
    shard: int | None = None,
    ranks: tuple[int, ...] | None = None,
) -> Layout:
    """Return a layout with these sizes.

    Args:
        shard: size of dp_shard, a divisor of dp; default: dp, so that dp_replicate is 1.
        ranks: as in `Layout`; default: 0, 1, 2, ...
    """
    shard = dp if shard is None else shard
    sizes = (pp, dp // shard, shard, sp, tp)
    return Layout(tuple(zip(AXES, sizes, strict=True)), tuple(range(math.prod(sizes))) if ranks is None else ranks)


def read_layout(param: object, world_size: int, asked_by: str = "mesh_param") -> Layout:
    """Return the layout that the user passed as `initialize(mesh_param=...)`.

    Args:
        param: a pair (data parallel, sequence parallel); or a mapping of axes ("dp" or "data_parallel", ...) to sizes,
            where a missing dp gets the remaining ranks; None: all ranks are data parallel.
        world_size: the product of the sizes.
        asked_by: where the sizes come from, for the errors.

    Raises:
        ConfigError: for another form, an unknown axis, or sizes that do not fit.
    """
    if param is None:
        return grid(dp=world_size)
    if isinstance(param, Mapping):
        sizes = _from_mapping(param, world_size, asked_by)
    elif isinstance(param, tuple | list) and len(param) == 2 and all(_is_size(size) for size in param):
        sizes = {"dp": param[0], "sp": param[1]}
    else:
        raise ConfigError(
            f"{asked_by}: expected (data_parallel, sequence_parallel) or a mapping of axes to sizes, found {param!r}"
        )
    product = math.prod(sizes.values())
    if product != world_size:
        raise ConfigError(
            f"{asked_by}: {' x '.join(f'{axis} {sizes.get(axis, 1)}' for axis in _GIVEN_AXES)} = {product}, but the "
            f"world has {counted(world_size, 'rank')}; the sizes must multiply to it"
        )
    return grid(**sizes, ranks=tuple(range(world_size)))


def merge_sizes(asked: Iterable[tuple[str, str, int | None]]) -> dict[str, tuple[int, str]]:
    """Merge the axis sizes of several settings. Returns per axis its size and the config key that set it first.

    Args:
        asked: (config key, axis, size or None) for every setting.

    Raises:
        ConfigError: two settings have different sizes for one axis.
    """
    merged: dict[str, tuple[int, str]] = {}
    for name, axis, size in asked:
        if size is None:
            continue
        other, by = merged.setdefault(axis, (size, name))
        if other != size:
            raise ConfigError(f"{name}: found {size}, but {by} is {other}; both are the size of the axis {axis}")
    return merged


def _from_mapping(param: Mapping[Any, object], world_size: int, asked_by: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for name, size in param.items():
        axis = _ALIASES.get(name, name)
        if axis not in _GIVEN_AXES:
            raise ConfigError(f"{asked_by}.{name}: no such axis; the axes are {', '.join(_GIVEN_AXES)}")
        if not _is_size(size):
            raise ConfigError(f"{asked_by}.{name}: expected a positive integer, found {size!r}")
        if axis in given:
            raise ConfigError(f"{asked_by}.{name}: the axis {axis} is given twice")
        given[axis] = size  # type: ignore[assignment]
    given.setdefault("dp", max(1, world_size // math.prod(given.values())))
    return given


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
