"""`group_backend(group)`: the `GroupBackend` of a process group, chosen for it and made once."""

from collections.abc import Callable

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import GroupBackend, library_by_device, no_group_error
from deepspeed.comm.record import RecordedGroup, comms_logger, waits
from deepspeed.comm.torch_group import TorchGroup
from deepspeed.errors import CommError, PluginError
from deepspeed.log import warn_once
from deepspeed.ops.implementations import HOST
from deepspeed.plugins import plugin_manager

_backends: dict[ProcessGroup, GroupBackend] = {}
_for_barriers: set[ProcessGroup] = set()
# What makes them; None: the choice is made for each group.
_make: Callable[[ProcessGroup], GroupBackend] | None = None
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
    world = _current_world()
    if world is None:
        raise no_group_error("deepspeed.comm.group_backend()")
    if _world is not world:
        _backends.clear()  # the groups are gone: nothing to release
        _for_barriers.clear()
        serve_by(None)
    group = world if group is None else group
    _for_barriers.discard(group)
    if group not in _backends:
        _backends[group] = _create(group)
    chosen = _backends[group]
    return RecordedGroup(chosen) if comms_logger.enabled or waits.is_watched else chosen


def backend_for_barriers(group: ProcessGroup | None = None) -> GroupBackend:
    """`group_backend`, for a caller that makes nothing but barriers."""
    own = _current_world() if group is None else group
    is_asked = own in _backends and own not in _for_barriers
    backend = group_backend(group)
    if own is not None and not is_asked:
        _for_barriers.add(own)
    return backend


def makes_collectives(backend: GroupBackend) -> bool:
    """Whether anything but barriers was asked of it."""
    return backend.group not in _for_barriers


def known_backends() -> list[GroupBackend]:
    """The backends that were made for groups of the current world."""
    return list(_backends.values()) if _world is _current_world() else []


def forget(group: ProcessGroup | None = None, *, failed: bool = False) -> None:
    """Release the backend of `group` (None: of all groups), which ends.

    Called by `destroy_process_group` and between tests. `failed`: peers that wait for this rank raise.
    """
    for ended in [group] if group is not None else list(_backends):
        backend = _backends.pop(ended, None)
        _for_barriers.discard(ended)
        if backend is None:
            continue
        if failed and isinstance(backend, TorchGroup):
            backend.close()
        backend.release()


def serve_by(make: Callable[[ProcessGroup], GroupBackend] | None) -> None:
    """Make the backends of groups of the current world this way; None: choose for each group again."""
    global _make, _world
    forget()
    _make, _world = make, _current_world()


def plugin_backend(name: str, group: ProcessGroup | None) -> GroupBackend | None:
    """Ask plugins for the collectives of `group` over the library `name`; the hook is called once per group, never per
    bucket.

    Asked are the active plugins, and then the host extension, whichever accelerator was chosen.
    """
    get_accelerator()  # its plugin is among those that are asked
    offered = plugin_manager().hook.ds_comm_backend(name=name, group=group)
    if offered is None and HOST not in plugin_manager().providers("ds_comm_backend"):
        offered = _ask_host_extension(name, group)
    if offered is None or (not isinstance(offered, type) and isinstance(offered, GroupBackend)):
        return offered
    raise CommError(
        f"a plugin gave {offered!r} as the communication backend {name!r}; it must be an object with the methods of "
        "deepspeed.comm.backend.GroupBackend"
    )


def _current_world() -> ProcessGroup | None:
    return torch_dist.group.WORLD if torch_dist.is_available() and torch_dist.is_initialized() else None


def _ask_host_extension(name: str, group: ProcessGroup | None) -> GroupBackend | None:
    if HOST not in plugin_manager().names() or plugin_manager().refusal(HOST):
        return None
    try:
        return plugin_manager().ask(HOST, "ds_comm_backend", name=name, group=group)  # type: ignore[no-any-return]
    except PluginError as error:
        warn_once(f"{error}; going on with the collectives of torch.distributed")
        return None


def _create(group: ProcessGroup) -> GroupBackend:
    if _make is not None:
        return _make(group)
    return plugin_backend(library_of(group), group) or TorchGroup(group)


def library_of(group: ProcessGroup) -> str:
    """The name by which plugins know the library of `group`.

    gloo where that serves the host, also beside another library for the device: a plugin for the host serves both.
    """
    return "gloo" if library_by_device(group).get("cpu") == "gloo" else str(torch_dist.get_backend(group))
