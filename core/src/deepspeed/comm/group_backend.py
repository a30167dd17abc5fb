"""`group_backend(group)`: the `GroupBackend` of a process group, chosen for it and made once."""

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.libraries import library_by_device, no_group_error
from deepspeed.comm.reading_group import ReadingGroup
from deepspeed.comm.record import RecordedGroup, comms_logger
from deepspeed.comm.torch_group import TorchGroup

_backends: dict[ProcessGroup, GroupBackend] = {}
# Of which world group they are: a new world, also one that a library made, gets new ones.
_world: ProcessGroup | None = None


def group_backend(group: ProcessGroup | None = None) -> GroupBackend:
    """The collectives of `group`; called while an engine is built, by all ranks of the group in the same order.

    While the comms logger is on, one whose collectives it sees.

    Args:
        group: this process is a member of it; None: all ranks.

    Raises:
        CommError: before `init_distributed`.
    """
    global _world
    world = torch_dist.group.WORLD if torch_dist.is_available() and torch_dist.is_initialized() else None
    if world is None:
        raise no_group_error("deepspeed.comm.group_backend()")
    if _world is not world:
        _backends.clear()
        _world = world
    group = world if group is None else group
    if group not in _backends:
        _backends[group] = _create(group)
    chosen = _backends[group]
    return RecordedGroup(chosen) if comms_logger.enabled else chosen


def forget(group: ProcessGroup | None = None, *, failed: bool = False) -> None:
    """Release the backend of `group` (None: of all groups), which ends.

    Called by `destroy_process_group` and between tests. `failed`: peers that wait for this rank raise.
    """
    for ended in [group] if group is not None else list(_backends):
        backend = _backends.pop(ended, None)
        if backend is None:
            continue
        if failed and isinstance(backend, TorchGroup):
            backend.close()
        backend.release()


def _create(group: ProcessGroup) -> GroupBackend:
    libraries = library_by_device(group)
    on_host = libraries.get("cpu", libraries.get(""))
    return ReadingGroup(group) if on_host == "gloo" else TorchGroup(group)
