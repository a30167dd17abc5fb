"""The contracts between the core and a communication library.

`GroupBackend` serves one process group: asynchronous, out of place, one call per collective. `group_backend(group)`
gives it, and all stages of ZeRO use it. `torch_group.TorchGroup` is the implementation over `torch.distributed`; a
plugin gives another one with the hook `ds_comm_backend`.

Three kinds of `Work` are here: several of torch's as one, one with a local step after it, and one that is done.
Functions say which libraries serve torch's process groups.

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
        """Make the progress that is possible without blocking; True if `wait()` would not block the host.

        The result may be used after `wait()` only. False may also mean that the library cannot say before `wait()`
        (an all-reduce of three or more ranks by messages), so do not loop until it is True. Raises what `wait()` would.
        """

    def wait(self) -> None:
        """Return when the result may be used: the host blocks, or on a device the current stream does. Idempotent."""


@dataclass(frozen=True)
class Capabilities:
    """`Capabilities` says what a group's library can do, and at which sizes; the sharding plans by it.

    Args:
        native_reduce_scatter: a reduce-scatter is one operation of the library and moves (W - 1) / W of the buffer;
            otherwise it is made of others.
        completes_on_host: `Work.wait` blocks the host until the result is there; otherwise the current stream waits.
        preferred_bucket_bytes: size of the full buffer at which a reduce-scatter or an all-gather is efficient and
            still overlaps.
        preferred_all_reduce_bytes: the same for an all-reduce.
        matches_by_order: collectives are matched by their order in the group alone, so that ranks which issue different
            ones may get wrong numbers; the next all-reduce of a few fp64 values on the host says so.
    """

    native_reduce_scatter: bool
    completes_on_host: bool
    preferred_bucket_bytes: int
    preferred_all_reduce_bytes: int
    matches_by_order: bool = False


class Messages(Protocol):
    """Messages between two ranks of a group in host memory; see `PointToPoint`, whose tags are 0 to 7."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start to send a contiguous tensor to the rank `peer` of the group; waits for nothing."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Start to receive into a contiguous tensor, from the rank `peer` of the group; waits for nothing."""

    def abandon(self) -> None:
        """This rank failed: peers that wait for its messages raise, and name it. Waits for nobody."""


@runtime_checkable
class GroupBackend(Protocol):
    """The collectives of one process group. `deepspeed.comm.group_backend(group)` makes it, once per group.

    Call order: `connect` once, outside of backward, by all ranks together; then `capabilities` and `allocate` while
    buffers are built; then collectives, each followed by `Work.wait`, or all by one `abandon` where a rank cannot go
    on; `release` when an engine is destroyed.

    All ranks of the group issue the same collectives in the same order, with the same sizes, dtypes and tags, and wait
    for them at the same places among the collectives of the program. No call but `connect`, `barrier` and `Work.wait`
    waits for a peer. Tensors are contiguous, 1-D, and of one dtype and device in a call. From the call until `wait()`
    inputs are neither written nor freed and outputs neither read nor freed.

    Sums are in the order of ranks where the core makes them, and low-precision sums of three or more ranks are then
    made in fp32 and rounded once.

    A backend may also have `messages() -> Messages | None`, which all ranks call together after `connect`: messages
    that are faster than those of torch.distributed.

    A `tag` says what the collective is for, for example the path of a module. Where the transport can compare what the
    ranks do, ranks that issue different collectives or tags get a `CommError` that names both: where they read each
    other's memory at that collective, over gloo at the next all-reduce of a few fp64 values, or at the timeout.
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
        """Bytes kept between collectives for the next ones."""

    def connect(self) -> None:
        """Set up what collectives need. Called by all ranks together; idempotent. The first collective does it, too."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """An uninitialized 1-D tensor that this library moves well."""

    def all_reduce(self, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Sum `full_N` over the ranks, in place, on every rank."""

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Write to `shard_S` the sum over the ranks of part `rank` of `full_N`.

        `shard_S` may be that part of `full_N` itself, or other memory. The rest of `full_N` is undefined from this call
        on (the library may use it as scratch memory), and free after `wait()`.
        """

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Write the shards of all ranks to `full_N`, in rank order.

        `shard_S` may be its own part of `full_N`, which saves a copy.
        """

    def broadcast(self, tensor_N: torch.Tensor, source: int, *, tag: str | int | None = None) -> Work:
        """Copy `tensor_N` of rank `source` of the group to that of every rank."""

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
            output_N: receives; its numel is the sum of `output_numels`.
            input_N: is sent; other memory than `output_N`.
            output_numels: elements from each rank; None: W equal parts.
            input_numels: elements to each rank; None: W equal parts. That of rank a for rank b equals the
                `output_numels` of rank b for rank a.
            tag: what it is for.
        """

    def barrier(self) -> None:
        """Return when every rank of the group has called it."""

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works` of this group unfinished; their buffers are not used any more. Waits for nobody.

        `failed`: an exception, which is being handled, is the reason. Peers that wait for this rank, or come to wait
        for it, are to raise `PeerFailed`, and to name it, once for each time that it has abandoned; when all ranks have
        abandoned as often, collectives work again.
        Otherwise all ranks abandon the same collectives, and go on.
        """

    def release(self) -> None:
        """Give back memory that is kept between collectives. Waits for nobody."""


complete(__name__)  # DeepSpeed's base class of communication libraries


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


class _Done:
    """Nothing to wait for: one rank, or no elements."""

    def poll(self) -> bool:
        """Always done."""
        return True

    def wait(self) -> None:
        """Return at once."""


DONE = _Done()


class _Works:
    """Several torch works, waited for once."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[torch_dist.Work]) -> None:
        self._works = works

    def poll(self) -> bool:
        """Whether all are completed; an error is for `wait` to raise."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for each, in the order of issue."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()

    def ends_within(self, limit: timedelta) -> bool:
        """Wait for so long at most for each. Returns whether all are done; raises the error of one that failed."""
        for work in self._works:
            try:
                work.wait(limit)
            except RuntimeError:  # its own, or that of the limit
                if not work.is_completed():
                    return False
                work.wait()
        return True


class Followed:
    """A work and the step of this rank that follows it: a sum of what came, a copy to where it belongs.

    Args:
        work: in flight.
        step: makes the result, once.
        in_poll: the step may run in `poll`, because it works on host memory and needs no stream.
    """

    __slots__ = ("_in_poll", "_step", "work")

    def __init__(self, work: Work, step: Callable[[], None], *, in_poll: bool) -> None:
        self.work = work
        self._step: Callable[[], None] | None = step
        self._in_poll = in_poll

    def poll(self) -> bool:
        """Whether the work is done; then also make the step where that may be."""
        if not self.work.poll():
            return False
        if self._in_poll:
            self.wait()
        return True

    def wait(self) -> None:
        """Wait, and make the step if it was not made yet."""
        self.work.wait()
        step, self._step = self._step, None
        if step is not None:
            step()


def as_work(*works: torch_dist.Work | None) -> Work:
    """Several torch works (None: already done) as one."""
    return _Works([work for work in works if work is not None])


def ends_within(work: Work, limit: timedelta) -> bool:
    """`work.wait()` for a limited time, without the step that follows. Returns whether `wait` will return at once."""
    return all(part.ends_within(limit) for part in parts_of([work]) if isinstance(part, _Works))


def is_over(work: Work) -> bool:
    """Whether the works of torch that it is made of are completed, if with an error."""
    return all(part.poll() for part in parts_of([work]) if isinstance(part, _Works))


def parts_of(works: Sequence[Work]) -> list[Work]:
    """The works in flight that these are made of."""
    found: list[Work] = []
    for work in works:
        found += parts_of([work.work]) if isinstance(work, Followed) else [work]
    return found
