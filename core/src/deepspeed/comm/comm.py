"""The public functions of `deepspeed.comm`: the API of torch.distributed, under DeepSpeed's names.

Users and libraries call them; ZeRO uses `group_backend(group)` instead. `src` and `dst` are global ranks, as in
torch.distributed. With `async_op=True` a collective returns a handle with `wait()`. Every operation also takes `prof`,
`log_name` and `debug` for the comms logger.
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
    """True after `init_distributed`, or if other code has initialized torch.distributed."""
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
    """The global ranks of `group`, in the order of ranks within the group."""
    return torch_dist.get_process_group_ranks(get_world_group() if group is None else group)


def get_world_group() -> ProcessGroup:
    """Return the group of all ranks. Raises `CommError` before `init_distributed`."""
    group = torch_dist.group.WORLD if is_initialized() else None
    if group is None:
        raise backend.no_group_error("get_world_group")
    return group


# ---- groups --------------------------------------------------------------------------------------------------------


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None, **kwargs: Any) -> ProcessGroup:
    """Create a group of the global ranks `ranks`. Every rank of the world must call it, members or not.

    timeout: the timeout of the group's collectives; None: the timeout of the world group.
    """
    timeout = backend.timeout_of(get_world_group()) if timeout is None else timeout
    return torch_dist.new_group(None if ranks is None else list(ranks), timeout=timeout, **kwargs)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Create a torch DeviceMesh of these axes over the world; the last axis varies fastest. A collective of all ranks.

    The groups of the mesh have the timeout of the world group; torch's `init_device_mesh` uses torch's default.

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
    """Wait until every rank of the group has called this.

    Over gloo, a barrier raises within seconds if a peer has failed, or waits for this rank in another call of ds-core.
    A thread other than the main one gets torch's barrier in the group itself, without this check: such a barrier may
    run before a collective of the engine on one rank and after it on another.

    Args:
        device_ids: the device to wait on, for a library that serves a device; default: this rank's device.
    """
    members = group or get_world_group()
    is_ordered = not async_op and threading.current_thread() is threading.main_thread()
    if isinstance(members, ProcessGroup) and is_ordered and backend.is_gloo(members):
        try:
            plain(backend_for_barriers(members)).barrier()  # plain: `recorded` above records it already
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
    """Wait at a barrier that names the ranks which did not reach it within `timeout` (gloo only)."""
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
    """Run `all_reduce`, under the name that inference code calls. A backend may use a low-latency implementation."""
    return torch_dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@recorded
def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """`all_reduce` each tensor; all of them start before the first wait."""
    return _wait_or_return([torch_dist.all_reduce(t, op=op, group=group, async_op=True) for t in tensors], async_op)


@recorded
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce to global rank `dst`; on other ranks `tensor` is undefined afterwards."""
    return torch_dist.reduce(tensor, dst=dst, op=op, group=group, async_op=async_op)


@recorded
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce a list of tensors; rank r gets the r-th sum."""
    return torch_dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)


@recorded
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle:
    """Reduce `tensor`; rank r gets the r-th part. `tensor` has W times the elements of `output_tensor`."""
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
    """`all_gather_into_tensor` for each pair; all of them start before the first wait."""
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
    """Send the r-th part of `tensor` to rank r; part r of `output` comes from rank r."""
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
    """Send the r-th input tensor to rank r; output tensor r comes from rank r.

    gloo has no such collective, so over gloo this uses sends and receives.
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
    """Send to global rank `dst`. Returns when `tensor` may be reused."""
    torch_dist.send(tensor, dst=dst, group=group, tag=tag)


@recorded
def recv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive from global rank `src` (None: from any rank). Returns the sender's rank."""
    return torch_dist.recv(tensor, src=src, group=group, tag=tag)


@recorded
def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Handle:
    """Start to send to global rank `dst`."""
    return torch_dist.isend(tensor, dst=dst, group=group, tag=tag)


@recorded
def irecv(tensor: torch.Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Handle:
    """Start to receive from global rank `src` (None: from any rank)."""
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
    """Configure the comms logger from a config (an object or dict with `comms_logger`), then from the other arguments.

    `debug` adds the calling function to the names of collectives. Raises ConfigError if the section of a dict is wrong.
    """
    section = _comms_section(deepspeed_config)
    if section is not None:
        keys = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
        comms_logger.configure(*(getattr(section, key) for key in keys))
    comms_logger.configure(enabled, prof_all, prof_ops, verbose, debug)


def _comms_section(config: Any) -> Any:
    """Return the section `comms_logger` of a config; None if absent. Raises ConfigError if the section is wrong."""
    from deepspeed.config.intake import parse_section  # imported late: it loads pydantic, which few callers need
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
