"""The API of `deepspeed.utils.groups`: which ranks share data, model, sequence or expert parallelism with this one.

Libraries and models call these functions; features talk to each other through them. An `mpu` (Megatron's model
parallel unit, `initialize(mpu=...)`) or a `Mesh` (`initialize(mesh_param=...)`) says how ranks are laid out, set by
the engine with `set_mpu` and `set_mesh`; with neither, every rank is data parallel.

Every function raises `CommError` before `init_distributed`.
"""

from typing import Any

from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.errors import CommError, StateError
from deepspeed.parallel.mesh import Mesh, MeshSizes, read_sizes

mpu: Any = None
mesh: Mesh | None = None
# Of which world group `mesh` and the clone are: after destroy and init again they are made anew.
_world: ProcessGroup | None = None
_world_clone: ProcessGroup | None = None


# ---- set by the engine ---------------------------------------------------------------------------------------------


def set_mpu(new: Any) -> None:
    """Take the layout from `new`, which answers `get_data_parallel_group()`, `get_model_parallel_group()` and so on."""
    global mpu
    for name in ("get_data_parallel_group", "get_data_parallel_world_size", "get_data_parallel_rank"):
        if not callable(getattr(new, name, None)):
            raise StateError(f"mpu: {type(new).__name__} has no method {name}(); initialize(mpu=...) needs it")
    mpu = new


def set_mesh(param: object) -> Mesh:
    """Lay the ranks out as `mesh_param` says, and make the groups of every axis that has more than one rank.

    Collective: every rank calls it with the same `param`. Raises `ConfigError` if the sizes do not fit the world.
    """
    global mesh, _world
    _forget_old_world()
    new = Mesh(read_sizes(param, dist.get_world_size(dist.get_world_group())))
    for axes in (("dp",), ("sp",), ("tp",), ("pp",), ("dp", "sp")):
        if new.size(*axes) > 1:
            new.group(*axes)
    mesh, _world = new, dist.get_world_group()
    return new


def reset() -> None:
    """Forget mpu, mesh and groups; `engine.destroy` and tests call it."""
    global mpu, mesh, _world, _world_clone
    mpu, mesh, _world, _world_clone = None, None, None, None


# ---- the world -----------------------------------------------------------------------------------------------------


def _get_world_group() -> ProcessGroup:
    """Every rank."""
    return dist.get_world_group()


def _clone_world_group() -> ProcessGroup:
    """A group of its own over every rank, made once: its messages do not queue behind those of the world group.

    Collective on the first call.
    """
    global _world_clone, _world
    _forget_old_world()
    if _world_clone is None:
        _world_clone, _world = dist.new_group(range(dist.get_world_size())), dist.get_world_group()
    return _world_clone


def _get_broadcast_src_rank() -> int:
    """Global rank of the first member of this rank's data-parallel group: where initial weights come from."""
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


def _get_local_all_to_all_group() -> ProcessGroup:
    """Refused: groups per machine come with hierarchical communication."""
    raise CommError("_get_local_all_to_all_group: groups per machine (ZeRO++) are not supported by this version")


# ---- data ----------------------------------------------------------------------------------------------------------


def _get_data_parallel_group() -> ProcessGroup:
    """Ranks that hold the same part of the model and read different batches."""
    if mpu is not None:
        return mpu.get_data_parallel_group()  # type: ignore[no-any-return]
    return _mesh().group("dp")


def _get_data_parallel_world_size() -> int:
    """Ranks in the data-parallel group."""
    return int(mpu.get_data_parallel_world_size()) if mpu is not None else _mesh().size("dp")


def _get_data_parallel_rank() -> int:
    """This rank's place in the data-parallel group."""
    return int(mpu.get_data_parallel_rank()) if mpu is not None else _mesh().rank("dp")


def _get_data_parallel_group_ranks() -> list[int]:
    """Global ranks of the data-parallel group."""
    return dist.get_all_ranks_from_group(_get_data_parallel_group())


# ---- model (tensor) ------------------------------------------------------------------------------------------------


def _get_model_parallel_group() -> ProcessGroup:
    """Ranks that hold the parts of one layer."""
    if _mpu_has("get_model_parallel_group"):
        return mpu.get_model_parallel_group()  # type: ignore[no-any-return]
    return _mesh().group("tp")


def _get_model_parallel_world_size() -> int:
    """Ranks in the model-parallel group; 1 without tensor parallelism."""
    if _mpu_has("get_model_parallel_world_size"):
        return int(mpu.get_model_parallel_world_size())
    return _mesh().size("tp")


def _get_model_parallel_rank() -> int:
    """This rank's place in the model-parallel group."""
    if _mpu_has("get_model_parallel_rank"):
        return int(mpu.get_model_parallel_rank())
    return _mesh().rank("tp")


def get_tensor_model_parallel_group() -> ProcessGroup:
    """The model-parallel group under Megatron's name."""
    return _get_model_parallel_group()


def get_tensor_model_parallel_world_size() -> int:
    """Ranks in the model-parallel group."""
    return _get_model_parallel_world_size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the model-parallel group."""
    return _get_model_parallel_rank()


def _create_model_parallel(model_parallel_size: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Lay the ranks out with `model_parallel_size` ranks per model; returns (data group, model group). Collective."""
    new = set_mesh({"tp": model_parallel_size})
    return new.group("dp"), new.group("tp")


# ---- sequence ------------------------------------------------------------------------------------------------------


def _get_sequence_parallel_group() -> ProcessGroup:
    """Ranks that hold the parts of one sequence."""
    if _mpu_has("get_sequence_parallel_group"):
        return mpu.get_sequence_parallel_group()  # type: ignore[no-any-return]
    return _mesh().group("sp")


def _get_sequence_parallel_world_size() -> int:
    """Ranks in the sequence-parallel group; 1 without sequence parallelism."""
    if _mpu_has("get_sequence_parallel_world_size"):
        return int(mpu.get_sequence_parallel_world_size())
    return _mesh().size("sp")


def _get_sequence_parallel_rank() -> int:
    """This rank's place in the sequence-parallel group."""
    if _mpu_has("get_sequence_parallel_rank"):
        return int(mpu.get_sequence_parallel_rank())
    return _mesh().rank("sp")


def _get_sequence_data_parallel_group() -> ProcessGroup:
    """Ranks that share gradients: data and sequence parallel together. ZeRO divides its states over this group."""
    if _mpu_has("get_sequence_data_parallel_group"):
        return mpu.get_sequence_data_parallel_group()  # type: ignore[no-any-return]
    if mpu is not None:
        return _get_data_parallel_group()
    return _mesh().group("dp", "sp")


def _get_sequence_data_parallel_world_size() -> int:
    """Ranks in the sequence- and data-parallel group."""
    return dist.get_world_size(_get_sequence_data_parallel_group())


def _get_sequence_data_parallel_rank() -> int:
    """This rank's place in the sequence- and data-parallel group."""
    return dist.get_rank(_get_sequence_data_parallel_group())


# ---- experts -------------------------------------------------------------------------------------------------------


def _get_expert_parallel_group(group_name: str) -> ProcessGroup:
    """Refused: no expert groups exist in this version."""
    raise _no_experts("_get_expert_parallel_group", group_name)


def _get_expert_parallel_world_size(group_name: str) -> int:
    """Refused: no expert groups exist in this version."""
    raise _no_experts("_get_expert_parallel_world_size", group_name)


def _get_expert_parallel_rank(group_name: str) -> int:
    """Refused: no expert groups exist in this version."""
    raise _no_experts("_get_expert_parallel_rank", group_name)


def _get_expert_data_parallel_group(group_name: str) -> ProcessGroup:
    """Refused: no expert groups exist in this version."""
    raise _no_experts("_get_expert_data_parallel_group", group_name)


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """Refused: no expert groups exist in this version."""
    raise _no_experts("_get_expert_data_parallel_world_size", group_name)


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """Refused: no expert groups exist in this version."""
    raise _no_experts("_get_expert_data_parallel_rank", group_name)


def _get_expert_parallel_group_dict() -> dict[str, ProcessGroup]:
    """Name -> expert-parallel group; there are none."""
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, ProcessGroup]:
    """Name -> expert-data-parallel group; there are none."""
    return {}


def _get_max_expert_size() -> int:
    """Largest expert-parallel size; 1, because there are no expert groups."""
    return 1


# ---- inside --------------------------------------------------------------------------------------------------------


def _mesh() -> Mesh:
    """The mesh in force; all data parallel if nobody set one, which needs no new group and so is not collective."""
    global mesh, _world
    world = dist.get_world_group()
    _forget_old_world()
    if mesh is None:
        mesh, _world = Mesh(MeshSizes(dp=dist.get_world_size())), world
    return mesh


def _forget_old_world() -> None:
    """Drop groups of a world that was destroyed since."""
    global mesh, _world, _world_clone
    if _world is not None and _world is not dist.get_world_group():
        mesh, _world, _world_clone = None, None, None


def _mpu_has(method: str) -> bool:
    return mpu is not None and hasattr(mpu, method)


def _no_experts(asked: str, group_name: str) -> CommError:
    return CommError(
        f"{asked}({group_name!r}): no expert-parallel groups exist; mixture of experts is not supported by this version"
    )
