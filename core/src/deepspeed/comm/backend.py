"""The contracts between the core and a communication library.

`GroupBackend` serves one process group with asynchronous collectives, one call each. `group_backend(group)` returns
the `GroupBackend` of a group; all stages of ZeRO use it. `torch_group.TorchGroup` implements it over
`torch.distributed`; a plugin provides another implementation with the hook `ds_comm_backend`.

This module has three kinds of `Work`: several torch works as one, a work followed by a local step, and a finished
work. Its functions report which libraries serve torch's process groups.

Shape legend: N numel of a flat buffer, S numel of a shard (N == W * S), W ranks of the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed._absent import complete
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import CommError


@runtime_checkable
class Work(Protocol):
    """A collective in flight."""

    def poll(self) -> bool:
        """Make the progress that is possible without blocking; return True if `wait()` would not block the host.

        Use the result only after `wait()`. False may also mean that the library cannot tell before `wait()` (an
        all-reduce of three or more ranks by messages), so do not loop until True. Raises what `wait()` would raise.
        """

    def wait(self) -> None:
        """Block the host, or on a device the current stream, until the result is ready. Idempotent."""


@dataclass(frozen=True)
class Capabilities:
    """`Capabilities` describes what a group's library can do, and at which sizes; ZeRO's sharding plans with it.

    Args:
        native_reduce_scatter: a reduce-scatter is one operation of the library and moves (W - 1) / W of the buffer;
            otherwise it is composed of other collectives.
        completes_on_host: `Work.wait` blocks the host until the result is ready; otherwise the current stream waits.
        preferred_bucket_bytes: size of the full buffer at which a reduce-scatter or an all-gather is efficient and
            still overlaps.
        preferred_all_reduce_bytes: the same for an all-reduce.
        matches_by_order: the library matches collectives only by their order in the group, so ranks that issue
            different collectives may get wrong numbers; the next all-reduce of a few fp64 values on the host raises.
    """

    native_reduce_scatter: bool
    completes_on_host: bool
    preferred_bucket_bytes: int
    preferred_all_reduce_bytes: int
    matches_by_order: bool = False


class Messages(Protocol):
    """Messages between two ranks of a group in host memory, with tags 0 to 7; see `PointToPoint`."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start to send a contiguous tensor to the rank `peer` of the group. Does not block."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start to receive into a contiguous tensor from the rank `peer` of the group. Does not block."""

    def abandon(self) -> None:
        """Report that this rank failed: peers that wait for its messages raise and name this rank. Does not block."""


@runtime_checkable
class GroupBackend(Protocol):
    """The collectives of one process group. `deepspeed.comm.group_backend(group)` makes it, once per group.

    Call order: all ranks call `connect` once, outside of backward; then `capabilities` and `allocate` while they build
    buffers; then collectives, each followed by `Work.wait`, or one `abandon` for all of them if a rank cannot continue;
    `release` when an engine is destroyed.

    All ranks of the group issue the same collectives in the same order, with the same sizes, dtypes and tags, and wait
    for them at the same places among the collectives of the program. Only `connect`, `barrier` and `Work.wait` wait
    for a peer. Tensors are contiguous and 1-D, with one dtype and device per call. From the call until `wait()`, inputs
    are neither written nor freed and outputs are neither read nor freed.

    Where the core itself sums, it adds in the order of ranks, and sums the low-precision values of three or more ranks
    in fp32 and rounds once.

    A backend may also have `messages() -> Messages | None`, which all ranks call together after `connect`; these
    messages are faster than those of torch.distributed.

    A `tag` identifies the purpose of the collective, for example the path of a module. Where the transport can compare
    the ranks, ranks that issue different collectives or tags get a `CommError` that names both: at that collective if
    the ranks read each other's memory; over gloo at the next all-reduce of a few fp64 values, or at the timeout.
    """

    name: str
    group: ProcessGroup
    rank: int  # of this process within the group
    world_size: int

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `connect`."""

    @property
    def held_bytes(self) -> int:
        """Bytes of memory kept between collectives for reuse."""

    def connect(self) -> None:
        """Set up what collectives need. All ranks call it together; idempotent. The first collective calls it, too."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialized 1-D tensor in memory that this library moves efficiently."""

    def all_reduce(self, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Sum `full_N` over the ranks, in place, on every rank."""

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Sum part `rank` of `full_N` over the ranks, and write the sum to `shard_S`.

        `shard_S` may be that part of `full_N` itself, or other memory. The rest of `full_N` is undefined from this call
        on (the library may use it as scratch memory), and may be reused after `wait()`.
        """

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Write the shards of all ranks to `full_N`, in rank order.

        `shard_S` may be this rank's part of `full_N`, which saves a copy.
        """

    def broadcast(self, tensor_N: torch.Tensor, source: int, *, tag: str | int | None = None) -> Work:
        """Copy `tensor_N` from rank `source` of the group to every rank."""

    def all_to_all(
        self,
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        output_numels: Sequence[int] | None = None,
        input_numels: Sequence[int] | None = None,
        *,
        tag: str | int | None = None,
    ) -> Work:
        """Send part r of `input_N` to rank r, and write what rank r sends to part r of `output_N`.

        Args:
            output_N: the buffer to receive into; its numel is the sum of `output_numels`.
            input_N: the buffer to send; must not share memory with `output_N`.
            output_numels: elements from each rank; None: W equal parts.
            input_numels: elements to each rank; None: W equal parts. `input_numels[b]` of rank a equals
                `output_numels[a]` of rank b.
            tag: the purpose of the collective.
        """

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works` of this group unfinished; the caller no longer uses their buffers. Does not block.

        `failed`: the reason is an exception that is being handled. Peers that wait for this rank, now or later, must
        raise `PeerFailed` and name this rank, once for each time that it abandons. Collectives work again when all
        ranks have abandoned equally often.
        Without `failed`, all ranks abandon the same collectives and continue.
        """

    def release(self) -> None:
        """Free the memory that is kept between collectives. Does not block."""


complete(__name__)  # DeepSpeed's base class of communication libraries


def no_group_error(asked: str) -> CommError:
    """Return the error for a call of `asked` before a process group exists."""
    return CommError(f"{asked} was asked for, but no process group exists; call deepspeed.init_distributed() first")


def library_by_device(group: ProcessGroup) -> dict[str, str]:
    """Return `"cpu:gloo,xyz:abc"` as a dict. A library that serves every device is stored under ""."""
    config = str(torch_dist.get_backend_config(group))
    libraries = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return libraries or {"": str(torch_dist.get_backend(group))}


def is_gloo(group: ProcessGroup) -> bool:
    """Whether gloo serves the group, on every device."""
    return set(library_by_device(group).values()) == {"gloo"}


def serves(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a library for tensors on devices of this type."""
    return torch.device(device.type) in group._device_types


def host_or_device(group: ProcessGroup) -> torch.device:
    """Return the device to send small values from: the host if the group serves it, else this rank's device."""
    host = torch.device("cpu")
    return host if serves(group, host) else torch.device(get_accelerator().current_device_name())


def broadcast_together(tensors: Sequence[Tensor], ranks: GroupBackend, source: int, *, tag: str | int | None) -> None:
    """Broadcast `tensors`, which share one dtype and device, from rank `source` in one collective. The broadcast goes
    through this rank's accelerator if the group has no library for the tensors' device.

    Args:
        tensors: the same number and the same shapes on every rank.
        tag: the tag of the broadcast.
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
    """Return the index of this rank's device, on which a barrier waits; None if it waits in host memory or not at all.

    Without this index, some libraries guess the device from the global rank, and another rank may use that device.
    """
    if not isinstance(group, ProcessGroup):  # what torch gives a rank outside the group
        return None
    device = host_or_device(group)
    return None if device.type == "cpu" else [device.index or 0]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of collectives in `group`, or torch's default if this torch or a plugin's library does not
    expose the timeout."""
    host = torch.device("cpu")
    try:
        library = group._get_backend(host if serves(group, host) else group._device_types[0])
    except RuntimeError:  # a group that a plugin implements in Python
        return torch_dist.distributed_c10d.default_pg_timeout
    timeout: timedelta = getattr(
        getattr(library, "options", None), "_timeout", torch_dist.distributed_c10d.default_pg_timeout
    )
    return timeout


class _Done:
    """A finished work, for a group of one rank or an empty tensor."""

    def poll(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


DONE = _Done()


class _Works:
    """`_Works` waits for several torch works once."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[torch_dist.Work]) -> None:
        self._works = works

    def poll(self) -> bool:
        """Whether all works are completed. Only `wait` raises their errors."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for each work, in the order of issue."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()

    def ends_within(self, limit: timedelta) -> bool:
        """Wait at most `limit` for each work. Returns whether all are done; raises the error of a work that failed."""
        for work in self._works:
            try:
                work.wait(limit)
            except RuntimeError:  # the work failed, or the limit has passed
                if not work.is_completed():
                    return False
                work.wait()
        return True


class Followed:
    """A work and the local step that follows it, such as summing the received values or copying them to their place.

    Args:
        work: the work in flight.
        step: produces the result; runs once.
        in_poll: the step may run in `poll`, because it works on host memory and needs no stream.
    """

    __slots__ = ("_in_poll", "_step", "work")

    def __init__(self, work: Work, step: Callable[[], None], *, in_poll: bool) -> None:
        self.work = work
        self._step: Callable[[], None] | None = step
        self._in_poll = in_poll

    def poll(self) -> bool:
        """Whether the work is done. If it is done and `in_poll` is set, also run the step."""
        if not self.work.poll():
            return False
        if self._in_poll:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait, then run the step unless it has run already."""
        self.work.wait()
        step, self._step = self._step, None
        if step is not None:
            step()


def as_work(*works: torch_dist.Work | None) -> Work:
    """Combine several torch works into one; None stands for a work that is already done."""
    return _Works([work for work in works if work is not None])


def ends_within(work: Work, limit: timedelta) -> bool:
    """Wait at most `limit` for `work`, without running its step. Returns whether `work.wait()` would return at once."""
    return all(part.ends_within(limit) for part in parts_of([work]) if isinstance(part, _Works))


def is_over(work: Work) -> bool:
    """Whether all torch works inside `work` are completed, with or without an error."""
    return all(part.poll() for part in parts_of([work]) if isinstance(part, _Works))


def parts_of(works: Sequence[Work]) -> list[Work]:
    """Return the works in flight inside `works`, without the steps that follow them."""
    found: list[Work] = []
    for work in works:
        found += parts_of([work.work]) if isinstance(work, Followed) else [work]
    return found
