"""The API of `deepspeed.utils.groups`: the groups of data, model, sequence and expert parallelism of this rank.

These functions read one mesh: the mesh of the engine built last or the mesh that the user made here (`set_mesh`,
`set_mpu`, `initialize`), whichever is newer; by default all ranks are data parallel. The parts of an engine use
`engine.mesh`, and so should a program with several engines. An engine that gets neither `mpu` nor `mesh_param` uses the
mesh that the user made here. Only engines of divided models use the mesh of `tp_model_init`.

Every function raises `CommError` before `init_distributed`.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.comm.own_group import group_of_members
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import CommError, ConfigError
from deepspeed.log import warn_once
from deepspeed.parallel.layout import grid, read_layout
from deepspeed.parallel.mesh import Mesh, RankGrid, mesh_of_mpu
from deepspeed.parallel.model_part import EXPERT_PREFIX

_viewed: Mesh | None = None  # the mesh that the functions below read
_default: Mesh | None = None  # for engines that get no other mesh: the user's own, or all ranks data parallel
_divided: Mesh | None = None  # the mesh of `tp_model_init`, for engines of divided models that get no other mesh
_world_clones: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


# ---- which mesh ----------------------------------------------------------------------------------------------------


def set_mesh(param: object) -> Mesh:
    """Arrange the ranks in a mesh. A collective: every rank calls it with the same `param`.

    Args:
        param: the same forms as `deepspeed.initialize(mesh_param=...)`.

    Raises:
        ConfigError: if the sizes do not fit the world.
    """
    return _choose(Mesh(read_layout(param, dist.get_world_group().size())))


def set_mpu(new: Any) -> Mesh:
    """Use the layout and the groups of an `mpu`. A collective of the ranks that its groups connect.

    Raises:
        ConfigError: if the mpu has no data-parallel group, or its methods contradict each other.
    """
    return _choose(mesh_of_mpu(new))


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Create the groups of experts. A collective of all ranks.

    Args:
        ep_size: number of ranks over which the experts of a layer are divided.
        mpu: defines the layout of the ranks; default: the mesh that is set already.

    Raises:
        ConfigError: if `ep_size` does not divide the ranks that average a gradient.
    """
    if mpu is not None:
        set_mpu(mpu)
    _create_expert_and_data_parallel(ep_size)


def create_mesh(
    mpu: Any = None,
    mesh_param: object = None,
    asked: Mapping[str, tuple[int, str]] | None = None,
    *,
    is_divided: bool = False,
) -> Mesh:
    """Return the mesh of a new engine; called by `deepspeed.initialize`. A collective.

    Args:
        mpu: the caller's `mpu`, if any.
        mesh_param: the caller's `mesh_param`, if any. Without both: the mesh that the user made here, or a new mesh of
            the sizes in `asked`.
        asked: per axis, the size that the configuration or the model requests, and its key.
        is_divided: ranks hold parts of the model's parameters, so the mesh may be the one of `tp_model_init`.

    Raises:
        ConfigError: the sizes do not fit the world, differ between ranks, or differ from the caller's own mesh.
    """
    asked = asked or {}
    if mpu is not None:
        return _checked(mesh_of_mpu(mpu), asked, f"mpu ({type(mpu).__name__})")
    kept = _of_this_world(_divided)
    _check_same(mesh_param, asked, is_divided=is_divided and kept is not None)
    world_size = dist.get_world_group().size()
    if mesh_param is not None:
        return _checked(Mesh(read_layout(mesh_param, world_size)), asked, "initialize(mesh_param=...)")
    own = _of_this_world(_default)
    if own is not None and own.size("dp") < world_size:
        return _checked(own, asked, "the mesh made through deepspeed.utils.groups")
    if kept is not None and (is_divided or "tp" in asked):
        if all(kept.size(axis) == size for axis, (size, _) in asked.items()):
            return kept
    elif kept is not None and not asked:
        warn_once(
            f"initialize: tp_model_init has laid the ranks out with tp {kept.size('tp')}, and this model is whole, so "
            f"all {world_size} ranks average its gradients. If its layers divide themselves over tensor-parallel "
            "ranks, set tensor_model_parallel = True on their parameters, or give initialize mesh_param or mpu"
        )
    if not asked:
        return _default_mesh()
    sizes = {axis: size for axis, (size, _) in asked.items()}
    return Mesh(read_layout(sizes, world_size, asked_by=", ".join(key for _, key in asked.values())))


def _check_same(mesh_param: object, asked: Mapping[str, tuple[int, str]], *, is_divided: bool) -> None:
    """Raise on all ranks if they ask for different meshes: they would hang while making the groups. A collective."""
    own = {} if mesh_param is None else {"mesh_param": str(mesh_param)}
    own |= {"the mesh of tp_model_init": "parameters are marked tensor_model_parallel"} if is_divided else {}
    own |= {f"{key} ({axis})": str(size) for axis, (size, key) in asked.items()}
    found = all_gather_values(own)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            first, other = (", ".join(f"{key}: {size}" for key, size in each.items()) for each in (found[0], theirs))
            raise ConfigError(
                f"mesh: rank 0 asks for {first or 'all ranks data parallel'}, and rank {rank} for "
                f"{other or 'all ranks data parallel'}; give every rank the same sizes"
            )


def _checked(mesh: Mesh, asked: Mapping[str, tuple[int, str]], made_by: str) -> Mesh:
    for axis, (size, key) in asked.items():
        if mesh.size(axis) != size:
            raise ConfigError(f"{key}: found {size}, but {made_by} has {axis} {mesh.size(axis)}; give the same size")
    return mesh


def keep_for_divided(mesh: Mesh) -> None:
    """Use `mesh` for engines of divided models that are built later and get no other mesh."""
    global _divided
    _divided = mesh
    view(mesh)


def view(mesh: Mesh) -> None:
    """Make the functions of this module read `mesh` from now on; called when an engine is built."""
    global _viewed
    _viewed = mesh


def viewed_mesh() -> Mesh:
    """Return the mesh that the functions of this module read."""
    return _mesh()


def mesh_of_whole_models() -> Mesh:
    """Return the mesh of engines of whole models that get no other mesh."""
    return _default_mesh()


def reset() -> None:
    """Forget the mesh; for tests."""
    global _viewed, _default, _divided
    _viewed, _default, _divided = None, None, None


# ---- the world -----------------------------------------------------------------------------------------------------


def _get_world_group() -> ProcessGroup:
    """The group of all ranks."""
    return dist.get_world_group()


def _clone_world_group() -> ProcessGroup:
    """Return a separate group of all ranks, created once. Its messages do not queue behind the world group's.

    A collective on the first call.
    """
    world = dist.get_world_group()
    if world not in _world_clones:
        _world_clones[world] = group_of_members(range(world.size()))
    return _world_clones[world]


def _get_broadcast_src_rank() -> int:
    """Global rank that broadcasts the initial values of this rank's parameters."""
    return _mesh().ranks("dp", "sp")[0]


def _get_local_all_to_all_group() -> ProcessGroup:
    """Raise `CommError`: there are no groups per machine."""
    raise CommError("_get_local_all_to_all_group: groups per machine (ZeRO++) are not supported by this version")


# ---- data ----------------------------------------------------------------------------------------------------------


def _get_data_parallel_group() -> ProcessGroup:
    """Ranks that hold the same part of the model and read different batches."""
    return _mesh().group("dp")


def _get_data_parallel_world_size() -> int:
    """Ranks in the data-parallel group."""
    return _mesh().size("dp")


def _get_data_parallel_rank() -> int:
    """This rank's index in the data-parallel group."""
    return _mesh().rank("dp")


def _get_data_parallel_group_ranks() -> list[int]:
    """Global ranks of the data-parallel group."""
    return list(_mesh().ranks("dp"))


# ---- model (tensor) ------------------------------------------------------------------------------------------------


def _get_model_parallel_group() -> ProcessGroup:
    """Ranks that hold the parts of one layer."""
    return _mesh().group("tp")


def _get_model_parallel_world_size() -> int:
    """Ranks in the model-parallel group; 1 without tensor parallelism."""
    return _mesh().size("tp")


def _get_model_parallel_rank() -> int:
    """This rank's index in the model-parallel group."""
    return _mesh().rank("tp")


def get_tensor_model_parallel_group() -> ProcessGroup:
    """The model-parallel group under Megatron's name."""
    return _get_model_parallel_group()


def get_tensor_model_parallel_world_size() -> int:
    """Ranks in the model-parallel group."""
    return _get_model_parallel_world_size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's index in the model-parallel group."""
    return _get_model_parallel_rank()


def _create_model_parallel(model_parallel_size: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Use `model_parallel_size` ranks per model. Returns (data group, model group). A collective of all ranks."""
    new = set_mesh({"tp": model_parallel_size})
    return new.group("dp"), new.group("tp")


# ---- sequence ------------------------------------------------------------------------------------------------------


def _get_sequence_parallel_group() -> ProcessGroup:
    """Ranks that hold the parts of one sequence."""
    return _mesh().group("sp")


def _get_sequence_parallel_world_size() -> int:
    """Ranks in the sequence-parallel group; 1 without sequence parallelism."""
    return _mesh().size("sp")


def _get_sequence_parallel_rank() -> int:
    """This rank's index in the sequence-parallel group."""
    return _mesh().rank("sp")


def _get_sequence_data_parallel_group() -> ProcessGroup:
    """Ranks that average a gradient: data and sequence parallel combined. ZeRO shards its states over this group."""
    return _mesh().gradient_group()


def _get_sequence_data_parallel_world_size() -> int:
    """Ranks in the sequence- and data-parallel group."""
    return _mesh().size("dp", "sp")


def _get_sequence_data_parallel_rank() -> int:
    """This rank's index in the sequence- and data-parallel group."""
    return _mesh().rank("dp", "sp")


# ---- ZeRO's shards (MiCS, hpZ) -------------------------------------------------------------------------------------


def _get_zero_param_intra_parallel_group() -> ProcessGroup:
    """Ranks that hold the shards of one copy of the weights: `mics_shard_size` or `zero_hpz_partition_size` ranks."""
    return _mesh().shard_group()


def _get_zero_param_intra_parallel_group_world_size() -> int:
    """Ranks that hold the shards of one copy of the weights."""
    return _mesh().size("dp_shard", "sp")


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    """This rank's index among the ranks that hold the shards of one copy."""
    return _mesh().rank("dp_shard", "sp")


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    """Global ranks that hold the shards of one copy."""
    return list(_mesh().ranks("dp_shard", "sp"))


# ---- experts: groups are named "ep_size_<ranks over which the experts are divided>" ---------------------------------


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Create the groups for experts that are divided over `expert_parallel_size_` ranks, once. A collective of all
    ranks.

    Raises ConfigError if the size does not divide the ranks that average a gradient.
    """
    _mesh().experts(expert_parallel_size_, data_before_expert=use_data_before_expert_parallel_)


def _get_expert_parallel_group(group_name: str) -> ProcessGroup:
    """Ranks over which the experts are divided."""
    return _experts(group_name).group("ep")


def _get_expert_parallel_world_size(group_name: str) -> int:
    """Number of ranks over which the experts are divided."""
    return _experts(group_name).size("ep")


def _get_expert_parallel_rank(group_name: str) -> int:
    """This rank's index among the ranks over which the experts are divided."""
    return _experts(group_name).rank("ep")


def _get_expert_data_parallel_group(group_name: str) -> ProcessGroup:
    """Ranks that hold the same experts and average their gradients."""
    return _experts(group_name).group("edp")


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """Number of ranks that hold the same experts."""
    return _experts(group_name).size("edp")


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """This rank's index among the ranks that hold the same experts."""
    return _experts(group_name).rank("edp")


def _get_expert_parallel_group_dict() -> dict[str, ProcessGroup]:
    """Name -> expert-parallel group."""
    return {f"{EXPERT_PREFIX}{size}": grid.group("ep") for size, grid in _expert_grids().items()}


def _get_expert_data_parallel_group_dict() -> dict[str, ProcessGroup]:
    """Name -> expert-data-parallel group."""
    return {f"{EXPERT_PREFIX}{size}": grid.group("edp") for size, grid in _expert_grids().items()}


def _get_max_expert_size() -> int:
    """Largest expert-parallel size; 1 without expert groups."""
    return max(_expert_grids(), default=1)


def _get_max_expert_size_name() -> str:
    """Name of the groups with the largest expert-parallel size."""
    return f"{EXPERT_PREFIX}{_get_max_expert_size()}"


# ---- inside --------------------------------------------------------------------------------------------------------


def _choose(mesh: Mesh) -> Mesh:
    global _default
    _default = mesh
    view(mesh)
    return mesh


def _of_this_world(mesh: Mesh | None) -> Mesh | None:
    """Return `mesh`, or None if its world was destroyed."""
    return mesh if mesh is not None and mesh.world is dist.get_world_group() else None


def _default_mesh() -> Mesh:
    global _default
    _default = _of_this_world(_default) or Mesh(grid(dp=dist.get_world_group().size()))  # this mesh creates no group
    return _default


def _mesh() -> Mesh:
    """Return the mesh that this module reads."""
    return _of_this_world(_viewed) or _default_mesh()


def _expert_grids() -> Mapping[int, RankGrid]:
    return _mesh().expert_grids


def _experts(name: str) -> RankGrid:
    grids = _expert_grids()
    size = name.removeprefix(EXPERT_PREFIX)
    if not size.isdecimal() or int(size) not in grids:
        has = ", ".join(f"{EXPERT_PREFIX}{size}" for size in grids) or "none"
        raise CommError(
            f"groups: asked for the expert groups {name!r}, found {has}; make them on all ranks first, with "
            "groups._create_expert_and_data_parallel(expert_parallel_size)"
        )
    return grids[int(size)]


# ---- the same without the underscore --------------------------------------------------------------------------------


def get_data_parallel_group() -> ProcessGroup:
    """Ranks that see different samples."""
    return _get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """The number of ranks that see different samples."""
    return _get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    """This rank's index among the ranks that see different samples."""
    return _get_data_parallel_rank()


def get_model_parallel_group() -> ProcessGroup:
    """Ranks that share the layers of a model."""
    return _get_model_parallel_group()


def get_model_parallel_world_size() -> int:
    """The number of ranks that share the layers of a model."""
    return _get_model_parallel_world_size()


def get_model_parallel_rank() -> int:
    """This rank's index among the ranks that share the layers of a model."""
    return _get_model_parallel_rank()
