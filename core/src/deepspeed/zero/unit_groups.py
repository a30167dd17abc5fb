"""`UnitGroups` holds the process groups of an engine's units, from its mesh and the marks on parameters of experts.

`engine/build.py` creates it; stages call `of(param)`. `UnitRanks` are the groups of one unit:

    parameters              shard_group          replicate_group    secondary_group    reduce_group
    of all ranks            data group           None               None               data group
    of all ranks, MiCS      shard group          replicate group    None               data group
    of all ranks, hpZ       data group           None               shard group        data group
    of a copy per rank      this rank            None               None               this rank
    of experts              expert data group    None               None               expert data group
    of several stages       data group           their peers        None               data group

The data group is dp x sp of the mesh (`mesh.gradient_group()`). The expert data group is the ranks that hold the same
experts (`mesh.gradient_group(ep_size)`).

[Note: the average] Every gradient, even an expert's, is the sum over `reduce_group` divided by the size of the *data
group*. Experts get the tokens of all ranks, whose losses are averaged over the data group. So this is the gradient of
the mean loss, independent of `ep_size`. The gradient of a parameter that several pipeline stages hold is the sum over
the stages, as in a single-rank model that uses the parameter several times.

MiCS: arXiv 2205.00119. hpZ: ZeRO++, arXiv 2306.10209, section 3.2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values, check_same
from deepspeed.errors import ConfigError
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import expert_group_of, expert_sizes, is_tensor_parallel, part_held, tied_stages


@dataclass(frozen=True)
class UnitRanks:
    """`UnitRanks` holds the groups over which a unit is sharded, and over which its gradients are summed.

    Args:
        shard_group: ranks that hold the shards of one copy of the weights.
        reduce_group: ranks that hold the same parameters; gradients are summed over them.
        replicate_group: ranks that hold the same shard, one in each copy; None: there is one copy.
        secondary_group: ranks that together hold a second copy of the weights (hpZ); None: there is none.
        copies: by copy and shard, the holder's rank in `reduce_group`; empty: one copy, in rank order.
        is_tied: whether the replicate group is other pipeline stages that use the parameter in other layers.
        part: which of `num_parts` parameter sets this rank holds; other ranks' experts are other parameters.

    `world_size` is the number of shards of one copy, and `rank` the index of this rank's shard.
    """

    shard_group: GroupBackend
    reduce_group: GroupBackend
    replicate_group: GroupBackend | None = None
    secondary_group: GroupBackend | None = None
    copies: tuple[tuple[int, ...], ...] = ()
    part: int = 0
    num_parts: int = 1
    is_tied: bool = False
    world_size: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", self.shard_group.world_size)
        object.__setattr__(self, "rank", self.shard_group.rank)

    @classmethod
    def over(cls, ranks: GroupBackend, *, part: int = 0, num_parts: int = 1) -> "UnitRanks":
        """Return the groups of one copy that is sharded over `ranks`."""
        return cls(ranks, ranks, part=part, num_parts=num_parts)

    def holders(self, shard: int) -> tuple[int, ...]:
        """Return the ranks in `reduce_group` that hold a shard, one for each copy."""
        return tuple(copy[shard] for copy in self.copies) or (shard,)


def source_in(group: ProcessGroup, global_rank: int) -> int:
    """Return the rank in `group` of a global rank, or 0 if it is not a member (possible for a group of experts)."""
    members = torch.distributed.get_process_group_ranks(group)
    return members.index(global_rank) if global_rank in members else 0


def broadcast_from(ranks: GroupBackend, param: Tensor, source: int) -> None:
    """Broadcast the values of `param` from the global rank `source` to all ranks of the group; see `source_in`."""
    value = param.data.contiguous()
    ranks.broadcast(value.view(-1), source_in(ranks.group, source), tag="GatheredParameters").wait()
    param.data.copy_(value)


class ReplicationMode(Enum):
    """`ReplicationMode` says what each shard group holds if the mesh divides dp into dp_replicate x dp_shard."""

    NONE = auto()  # no copy of its own
    MODEL = auto()  # a copy of the sharded model (MiCS)
    WEIGHTS = auto()  # a second copy of the weights (hpZ)
    RANKS = auto()  # each rank trains a copy of its own (`local_sgd`)


@dataclass(frozen=True)
class UnitGroups:
    """`UnitGroups` holds the groups of all units of an engine.

    Args:
        dense: groups of parameters that all ranks of the data group hold.
        experts: groups of experts' parameters, by `param.group_name`.
        tied: groups of parameters that several pipeline stages hold, by these stages.
        parts: ranks that together hold a divided parameter, by the name of a group of experts, or "tp".
        stages_divide_experts: whether the ranks of a pipeline stage hold different experts; the same on all ranks.
    """

    dense: UnitRanks
    experts: Mapping[str, UnitRanks] = field(default_factory=dict)
    tied: Mapping[tuple[int, ...], UnitRanks] = field(default_factory=dict)
    parts: Mapping[str, GroupBackend] = field(default_factory=dict)
    stages_divide_experts: bool = False

    def of(self, param: Tensor) -> UnitRanks:
        """Return the groups of a parameter's unit."""
        if stages := tied_stages(param):
            return self.tied[stages]
        name = expert_group_of(param)
        return self.dense if name is None else self.experts[name]

    def holders_of_parts(self, param: Tensor) -> GroupBackend | None:
        """Return the ranks that together hold a parameter, if a mark of `parallel.model_part` declares it divided;
        None: this rank holds all of it."""
        part = part_held(param)
        if part is None or part.is_whole:
            return None
        return self.parts["tp" if is_tensor_parallel(param) else str(expert_group_of(param))]

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks hold the same shard of some unit and sum its gradients."""
        return self.dense.replicate_group is not None or bool(self.tied)

    @property
    def divides_experts(self) -> bool:
        """Whether ranks hold different experts."""
        return any(ranks.num_parts > 1 for ranks in self.experts.values())

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank holds shards of the first copy of the weights; True if there is one copy."""
        return self.dense.replicate_group is None or self.dense.replicate_group.rank == 0

    def refuse_divided_experts(self, asked: str) -> None:
        """Refuse to save or load experts that no mark of `parallel.model_part` describes.

        Raises:
            ConfigError: if ranks hold different experts.
        """
        if self.divides_experts:
            raise ConfigError(
                f"{asked}: the experts of the model are divided over ranks (param.group_name is "
                f"{', '.join(self.experts)}), and their parameters do not say which experts of the model they are; "
                "mark them with deepspeed.parallel.model_part.mark_part, as deepspeed.moe's layers do, or save the "
                "module's own state_dict() on every rank, in stage 3 after engine.destroy()"
            )

    def backends(self) -> list[GroupBackend]:
        """Return all groups, each once, in the same order on all ranks."""
        return list(dict.fromkeys(self._all()))

    def _all(self) -> Iterator[GroupBackend]:
        for ranks in (self.dense, *self.experts.values(), *self.tied.values()):
            groups = (ranks.reduce_group, ranks.shard_group, ranks.replicate_group, ranks.secondary_group)
            yield from (each for each in groups if each is not None)


def unit_groups(mesh: Mesh, module: Module, copies: ReplicationMode) -> UnitGroups:
    """Return the groups of the units of `module`. A collective that creates missing groups of experts.

    Raises:
        ConfigError: on every rank, if ranks mark different parameters as experts, or if a mark has no group.
    """
    data_group = mesh.gradient_group()
    marks = {path: name for path, param in module.named_parameters() if (name := expert_group_of(param)) is not None}
    check_same({"the parameters of experts, with their group_name,": str(marks)}, data_group)
    sizes = expert_sizes(module)
    all_sizes = _make_groups_of_experts(mesh, set(sizes.values()))
    dense = UnitRanks.over(group_backend(data_group))
    if copies is ReplicationMode.MODEL and mesh.size("dp_replicate") > 1:
        dense = _in_copies(mesh, dense.reduce_group)
    elif copies is ReplicationMode.RANKS:
        dense = UnitRanks.over(group_backend(mesh.group("tp")))  # nothing else is divided
    elif copies is ReplicationMode.WEIGHTS and mesh.size("dp_replicate") > 1:
        dense = replace(dense, secondary_group=group_backend(mesh.shard_group()))
    stages = sorted({found for param in module.parameters() if (found := tied_stages(param))})
    if stages and copies is not ReplicationMode.NONE:
        raise ConfigError(
            "initialize: found modules that pipeline stages share, with mics_shard_size or zero_hpz_partition_size; "
            "omit the key, or share no module"
        )
    tied = {each: replace(dense, replicate_group=group_backend(mesh.tied_group(each)), is_tied=True) for each in stages}
    experts = {name: _of_experts(mesh, size, dense) for name, size in sizes.items()}
    parts = {name: group_backend(mesh.experts(size).group("ep")) for name, size in sizes.items() if size > 1}
    if mesh.size("tp") > 1:
        parts["tp"] = group_backend(mesh.group("tp"))
    for each in parts.values():
        each.connect()
    return UnitGroups(dense, experts, tied, parts, stages_divide_experts=max(all_sizes, default=1) > 1)


def _in_copies(mesh: Mesh, everyone: GroupBackend) -> UnitRanks:
    members = mesh.ranks("dp", "sp")
    lines = [line for line in mesh.layout.lines("dp_shard", "sp") if line[0] in members]
    return UnitRanks(
        shard_group=group_backend(mesh.shard_group()),
        reduce_group=everyone,
        replicate_group=group_backend(mesh.replicate_group()),
        copies=tuple(tuple(map(members.index, line)) for line in lines),
    )


def _make_groups_of_experts(mesh: Mesh, ep_sizes: set[int]) -> set[int]:
    """Create the groups of experts. All ranks of the mesh call it together, including pipeline stages without such
    experts. Return the sizes of all stages."""
    if mesh.size("pp") > 1:
        ep_sizes = {size for theirs in all_gather_values(sorted(ep_sizes), mesh.norm_group) for size in theirs}
    for size in sorted(ep_sizes - {1}):
        mesh.experts(size)
    return ep_sizes


def _of_experts(mesh: Mesh, ep_size: int, dense: UnitRanks) -> UnitRanks:
    if ep_size == 1:  # every rank holds all experts
        return dense
    grid = mesh.experts(ep_size)
    return UnitRanks.over(group_backend(grid.group("edp")), part=grid.rank("ep"), num_parts=ep_size)
