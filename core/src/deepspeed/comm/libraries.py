"""The process groups of torch, and the libraries that serve them."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import GroupBackend
from deepspeed.errors import CommError


def no_group_error(asked: str) -> CommError:
    """Return the error for `asked`, which needs a process group where there is none."""
    return CommError(f"{asked} was asked for, but no process group exists; call deepspeed.init_distributed() first")


def library_by_device(group: ProcessGroup) -> dict[str, str]:
    """`"cpu:gloo,xyz:abc"` as a dict; a plain name serves every device and is stored under ""."""
    config = str(torch_dist.get_backend_config(group))
    libraries = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return libraries or {"": str(torch_dist.get_backend(group))}


def is_gloo(group: ProcessGroup) -> bool:
    """Whether gloo serves the group, on every device."""
    return set(library_by_device(group).values()) == {"gloo"}


def serves(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a library for tensors on such a device."""
    return torch.device(device.type) in group._device_types


def host_or_device(group: ProcessGroup) -> torch.device:
    """Return where small values are sent from: the host if the group has a library for it, else this rank's device."""
    host = torch.device("cpu")
    return host if serves(group, host) else torch.device(get_accelerator().current_device_name())


def broadcast_together(tensors: Sequence[Tensor], ranks: GroupBackend, source: int, *, tag: str | int | None) -> None:
    """Copy the tensors of rank `source`, of one dtype and on one device, to those of every rank, in one collective; by
    this rank's device where the group has no library for theirs.

    Args:
        tensors: as many on every rank, of the same shapes.
        tag: of the broadcast.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    if not serves(ranks.group, flat.device):  # stage 3 moves parameters later, shard by shard
        flat = flat.to(get_accelerator().current_device_name())
    ranks.broadcast(flat, source, tag=tag).wait()
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def barrier_devices(group: ProcessGroup) -> list[int] | None:
    """The index of the device on which a barrier waits: this rank's. None where it waits in host memory, or not at all.

    Without it some libraries take the device that the global rank suggests, which another rank may have.
    """
    if not isinstance(group, ProcessGroup):  # what torch gives a rank outside the group
        return None
    device = host_or_device(group)
    return None if device.type == "cpu" else [device.index or 0]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long a collective of `group` waits for a peer, or torch's default if this torch or a plugin's library
    does not say how long."""
    host = torch.device("cpu")
    try:
        library = group._get_backend(host if serves(group, host) else group._device_types[0])
    except RuntimeError:  # of a group that a plugin wrote in Python
        return torch_dist.distributed_c10d.default_pg_timeout
    timeout: timedelta = getattr(
        getattr(library, "options", None), "_timeout", torch_dist.distributed_c10d.default_pg_timeout
    )
    return timeout
