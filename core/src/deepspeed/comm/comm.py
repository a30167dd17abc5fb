"""The public functions of `deepspeed.comm`: the surface of torch.distributed, under the names DeepSpeed gives it.

Users and libraries call them; ZeRO uses `group_backend(group)` instead. Ranks given as `src` or `dst` are global ranks,
as in torch.distributed. Every collective takes `async_op`; with True it returns a handle with `wait()`. Each also takes
`prof`, `log_name` and `debug` for the comms logger.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, ReduceOp

from deepspeed._absent import complete
from deepspeed.comm import backend, transports
from deepspeed.comm.backend import as_work
from deepspeed.comm.give_up import give_up
from deepspeed.comm.record import (  # noqa: F401 - DeepSpeed has the class here
    CommsLogger,
    comms_logger,
    plain,
    recorded,
)
from deepspeed.comm.torch_group import backend_for_barriers
from deepspeed.errors import CommError, counted

Handle = torch_dist.Work | None


# ---- questions -----------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """True if this torch was built with torch.distributed."""
    return torch_dist.is_available()


def is_initialized() -> bool:
    """True after `init_distributed`, or if a library has initialized torch.distributed itself."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in `group`; -1 if it is not a member."""
    return torch_dist.get_rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks in `group`; -1 if this process is not a member."""
    return torch_dist.get_world_size(group)


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The global rank of rank `group_rank` of `group`."""
    return torch_dist.get_global_rank(get_world_group() if group is None else group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The global ranks of `group`, in the order of its own ranks."""
    return torch_dist.get_process_group_ranks(get_world_group() if group is None else group)


def get_world_group() -> ProcessGroup:
    """The group of every rank; `CommError` before `init_distributed`."""
    group = torch_dist.group.WORLD if is_initialized() else None
    if group is None:
        raise backend.no_group_error("get_world_group")
    return group


# ---- groups --------------------------------------------------------------------------------------------------------


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None, **kwargs: Any) -> ProcessGroup:
    """A new group of global `ranks`; every rank of the world must call it, members or not.

    timeout: of its collectives; None: that of the world's group.
    """
    timeout = backend.timeout_of(get_world_group()) if timeout is None else timeout
    return torch_dist.new_group(None if ranks is None else list(ranks), timeout=timeout, **kwargs)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A torch DeviceMesh over the world with these axes, the last one varying fastest. A collective of all ranks.

    Its groups wait as long as the world's, where those of torch's `init_device_mesh` wait for torch's default.

    Raises:
        CommError: the sizes do not multiply to the world size, or there is not one name per axis.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from deepspeed.accelerator import get_accelerator

    shape, names = tuple(mesh_shape), tuple(mesh_dim_names)
    world_size = get_world_size()
    if math.prod(shape) != world_size or len(shape) != len(names) or not shape:
        raise CommError(
            f"initialize_mesh_device: found the shape {shape}, the names {names} and {counted(world_size, 'rank')}; "
            "give one name per axis, and sizes whose product is the number of ranks"
        )
    ranks = torch.arange(world_size).view(shape)
    own: list[ProcessGroup] = []
    for axis, size in enumerate(shape):
        for line in ranks.movedim(axis, -1).reshape(-1, size).tolist():
            group = get_world_group() if size == world_size else new_group(line)
            if get_rank() in line:
                own.append(group)
    device_type = str(get_accelerator().device_name())
    return DeviceMesh.from_group(own if len(own) > 1 else own[0], device_type, ranks, mesh_dim_names=names)


# ---- synchronization -----------------------------------------------------------------------------------------------


@recorded
def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None) -> Handle:
    """Wait until every rank of the group has come here.

    Over gloo, one that waits for a rank which waits for it in another call of ds-core, or which has failed, raises
    within seconds. Not in a thread beside the main one: its barriers may come before a collective of the engine's on
    one rank and after it on another, so they are torch's, in the group itself.

    Args:
        device_ids: the device on which to wait, for a library of devices; default: this rank's.
    """
    members = group or get_world_group()
    is_ordered = not async_op and threading.current_thread() is threading.main_thread()
    if isinstance(members, ProcessGroup) and is_ordered and backend.is_gloo(members):
        try:
            plain(backend_for_barriers(members)).barrier()  # recorded here
        except BaseException:
            give_up()
            raise
        return None
    devices = backend.barrier_devices(members) if device_ids is None else device_ids
    return torch_dist.barrier(group=group, async_op=async_op, device_ids=devices)


@recorded
def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks which did not come within `timeout` (gloo only)."""
    torch_dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)


# ---- reductions ----------------------------------------------------------------------------------------------------


@recorded
def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce over the ranks, in place, on every rank."""
    return torch_dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@recorded
def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Handle:
    """`all_reduce` as inference calls it; a backend may answer it with one of low latency."""
    return torch_dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@recorded
def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """`all_reduce` of each tensor, all started before the first is waited for."""
    return _wait_or_return([torch_dist.all_reduce(t, op=op, group=group, async_op=True) for t in tensors], async_op)


@recorded
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce into global rank `dst`; elsewhere the content is undefined afterwards."""
    return torch_dist.reduce(tensor, dst=dst, op=op, group=group, async_op=async_op)


@recorded
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce a list of tensors and leave the r-th on rank r."""
    return torch_dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)


@recorded
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce `tensor` and leave its r-th part on rank r; it has W times the elements of `output_tensor`."""
    return transports.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    **kwargs: Any,
) -> Handle:
    """`reduce_scatter_tensor`, which every supported torch has."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, **kwargs)


# ---- copies --------------------------------------------------------------------------------------------------------


@recorded
def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Handle:
    """Copy from global rank `src` to every rank."""
    return torch_dist.broadcast(tensor, src=src, group=group, async_op=async_op)


@recorded
def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Copy Python objects from global rank `src` into everyone's list (pickled: trusted ranks only)."""
    torch_dist.broadcast_object_list(object_list, src=src, group=group, device=device)


@recorded
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Handle:
    """Copy every rank's `tensor` into everyone's list."""
    return torch_dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)


@recorded
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Handle:
    """Copy every rank's `tensor` into one tensor, in the order of ranks."""
    return transports.all_gather_into_tensor(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    **kwargs: Any,
) -> Handle:
    """`all_gather_into_tensor`, which every supported torch has."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, **kwargs)


@recorded
def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather_into_tensor` of each pair, all started before the first is waited for."""
    works = [
        transports.all_gather_into_tensor(output, tensor, group=group, async_op=True)
        for output, tensor in zip(output_tensors, input_tensors, strict=True)
    ]
    return _wait_or_return(works, async_op)


@recorded
def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Copy every rank's Python object into everyone's list (pickled: trusted ranks only)."""
    torch_dist.all_gather_object(object_list, obj, group=group)


@recorded
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Copy every rank's `tensor` into the list of global rank `dst`."""
    return torch_dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)


@recorded
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Copy the r-th tensor of global rank `src`'s list to rank r."""
    return torch_dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)


@recorded
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Send the r-th part of `tensor` to rank r, and receive likewise."""
    return torch_dist.all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


@recorded
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Send the r-th tensor to rank r, and receive likewise.

    gloo has no such collective: there it is sends and receives.
    """
    group = get_world_group() if group is None else group
    if str(torch_dist.get_backend(group)) != "gloo":
        return torch_dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    rank = torch_dist.get_rank(group)
    peers = [peer for peer in range(torch_dist.get_world_size(group)) if peer != rank]
    works = [torch_dist.irecv(output_tensor_list[peer], group=group, group_src=peer) for peer in peers]
    works += [torch_dist.isend(input_tensor_list[peer].contiguous(), group=group, group_dst=peer) for peer in peers]
    output_tensor_list[rank].copy_(input_tensor_list[rank])
    return _wait_or_return(works, async_op)


# ---- point to point ------------------------------------------------------------------------------------------------


@recorded
def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send to global rank `dst` and return when it is on its way."""
    torch_dist.send(tensor, dst=dst, group=group, tag=tag)


@recorded
def recv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive from global rank `src` (None: from anyone); returns the sender."""
    return torch_dist.recv(tensor, src=src, group=group, tag=tag)


@recorded
def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Handle:
    """Start to send to global rank `dst`."""
    return torch_dist.isend(tensor, dst=dst, group=group, tag=tag)


@recorded
def irecv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Handle:
    """Start to receive from global rank `src` (None: from anyone)."""
    return torch_dist.irecv(tensor, src=src, group=group, tag=tag)


# ---- what this library can do --------------------------------------------------------------------------------------


def has_all_gather_into_tensor() -> bool:
    """True: every supported torch has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: every supported torch has it."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: `all_reduce_coalesced` starts all and waits once."""
    return True


def has_coalescing_manager() -> bool:
    """True if torch can gather collectives into one launch."""
    return hasattr(torch_dist, "_coalescing_manager")


def coalescing_manager(
    group: ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> AbstractContextManager[Any]:
    """Return torch's context manager, which launches the collectives started inside it together."""
    return torch_dist._coalescing_manager(group=group, device=device, async_ops=async_ops)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the comms logger on or off: from a config (an object or dict with `comms_logger`), then by each argument.

    `debug` adds the calling function to the names of collectives. Raises ConfigError for a wrong section of a dict.
    """
    section = _comms_section(deepspeed_config)
    if section is not None:
        keys = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
        comms_logger.configure(*(getattr(section, key) for key in keys))
    comms_logger.configure(enabled, prof_all, prof_ops, verbose, debug)


def _comms_section(config: Any) -> Any:
    """The section `comms_logger` of a config, None where it has none. Raises ConfigError for a dict that is wrong."""
    from deepspeed.config.intake import parse_section  # late: pydantic, which few callers need
    from deepspeed.config.monitor import CommsLoggerConfig

    section = config.get("comms_logger") if isinstance(config, Mapping) else getattr(config, "comms_logger", None)
    return parse_section(CommsLoggerConfig, section, "comms_logger") if isinstance(section, Mapping) else section


def _wait_or_return(works: list[Handle], async_op: bool) -> Any:
    handle = as_work(*works)
    if async_op:
        return handle
    handle.wait()
    return None


_START = ("destroy_process_group", "get_local_rank", "init_deepspeed_backend", "init_distributed", "set_backend")
_ELSEWHERE = {
    **{name: f"deepspeed.comm.start:{name}" for name in _START},
    **{name: f"torch.distributed:{name}" for name in ("P2POp", "batch_isend_irecv")},
    "log_summary": "deepspeed.comm.record:log_summary",
}
complete(__name__, elsewhere=_ELSEWHERE)
