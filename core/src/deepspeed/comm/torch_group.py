"""`GroupBackend` over torch.distributed: one process group, whatever its library. `group_backend(group)` chooses the
`GroupBackend` of a process group and makes it once.

Shape legend: N numel of a flat buffer, S numel of a shard (N == W * S), W ranks of the group.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import (
    DONE,
    Capabilities,
    Followed,
    GroupBackend,
    Work,
    as_work,
    barrier_devices,
    library_by_device,
    no_group_error,
    parts_of,
)
from deepspeed.comm.issued import CARRIER_NUMEL, Collective
from deepspeed.comm.record import RecordedGroup, comms_logger, waits
from deepspeed.comm.transports import GlooOnHost, OnlyAllReduceAndBroadcast, StagingPool, TensorCollectives, Transport
from deepspeed.comm.watch import Watch
from deepspeed.errors import CommError, PluginError, counted
from deepspeed.log import warn_once
from deepspeed.ops.implementations import HOST
from deepspeed.plugins import plugin_manager

# Two buckets of the preferred size. They stay between steps: fresh memory costs more than the sum it is for.
DEFAULT_STAGING_BYTES = 16 << 20
# Libraries that have no reduce-scatter and all-gather of whole tensors, or slow ones, and that complete on the host.
_HOST_LIBRARIES = ("gloo", "mpi")


class TorchGroup:
    """The collectives of one process group of torch.distributed.

    Args:
        group: this process is a member of it.
        staging_bytes: limit on the memory that is kept for values that are still to be added.
    """

    def __init__(self, group: ProcessGroup, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        self.group = group
        self.own_group = group  # in which the collectives run; another one from `connect` on, where they need it
        self.rank = torch_dist.get_rank(group)
        self.world_size = torch_dist.get_world_size(group)
        self.name = str(torch_dist.get_backend(group))
        self.staging = StagingPool(staging_bytes)
        self.watch = Watch(group)
        self._is_connected = False
        self._libraries = library_by_device(group)
        self._transports: dict[str, Transport] = {}

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the library that serves the group's device, or host memory where the group has no other.

        64 MiB on a device: a bucket costs the host what the backward of a layer does, and a block of up to 16 million
        elements is one unit of stage 3. 8 MiB for few ranks of a host library: a byte costs little less beyond it, and
        less of the last bucket is waited for. An all-reduce of two ranks: 16 MiB, which gloo steps through 3% faster
        than 4.
        """
        device = next((kind for kind in self._libraries if kind != "cpu"), "cpu")
        if self.library(device) not in _HOST_LIBRARIES:
            on_host = device == "cpu"
            size = (32 << 20) if on_host else (64 << 20)
            return Capabilities(True, on_host, size, size)
        size = (8 << 20) if self.world_size <= 8 else (32 << 20)
        all_reduce_size = (16 << 20) if self.world_size == 2 else size
        return Capabilities(False, True, size, all_reduce_size, matches_by_order=self.library("cpu") == "gloo")

    @property
    def held_bytes(self) -> int:
        return self.staging.held_bytes

    def connect(self) -> None:
        """Create a process group for these collectives alone, where the library needs one; see `own_group.py`."""
        if self._is_connected:
            return
        self.own_group = self.watch.connect()
        self._is_connected = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """An uninitialized 1-D tensor of torch's own allocator."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_reduce(self, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Sum in place on every rank."""
        _check("all_reduce", full_N)
        if self.world_size == 1 or full_N.numel() == 0:
            return DONE
        if full_N.dtype == torch.float64 and full_N.numel() <= CARRIER_NUMEL:
            return self._all_reduce_few(full_N, tag)
        return self._start("an all-reduce", tag, full_N, lambda transport, text: transport.all_reduce(full_N, text))

    def _all_reduce_few(self, values_N: torch.Tensor, tag: str | int | None) -> Work:
        """Sum with a checksum of what was issued before, where the library would not notice that ranks differ."""
        if not isinstance(self._transport_for(values_N), GlooOnHost):
            return self._start("an all-reduce", tag, values_N, lambda way, text: way.all_reduce(values_N, text))
        carrier_N = self.watch.issued.with_checksum(values_N)
        work = self._start("an all-reduce", tag, carrier_N, lambda way, text: way.all_reduce(carrier_N, text))

        def check() -> None:
            values_N.copy_(carrier_N[:-2])
            self.watch.issued.check(*carrier_N[-2:].tolist())

        return Followed(work, check, in_poll=True)

    def reduce_scatter(self, shard_S: torch.Tensor, full_N: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Sum this rank's part of `full_N` into `shard_S`."""
        _check("reduce_scatter", shard_S, full_N)
        self._check_shard("reduce_scatter", shard_S, full_N)
        if self.world_size == 1 or full_N.numel() == 0:
            return _copied(full_N, shard_S)
        return self._start(
            "a reduce-scatter", tag, full_N, lambda transport, text: transport.reduce_scatter(shard_S, full_N, text)
        )

    def all_gather(self, full_N: torch.Tensor, shard_S: torch.Tensor, *, tag: str | int | None = None) -> Work:
        """Gather the shards of all ranks."""
        _check("all_gather", shard_S, full_N)
        self._check_shard("all_gather", shard_S, full_N)
        if self.world_size == 1 or full_N.numel() == 0:
            return _copied(shard_S, full_N)
        return self._start(
            "an all-gather", tag, full_N, lambda transport, text: transport.all_gather(full_N, shard_S, text)
        )

    def broadcast(self, tensor_N: torch.Tensor, source: int, *, tag: str | int | None = None) -> Work:
        """Copy from rank `source` of the group."""
        _check("broadcast", tensor_N)
        if not 0 <= source < self.world_size:
            raise CommError(
                f"broadcast(source={source}) in a group of {counted(self.world_size, 'rank')}; give the source's rank "
                "within the group"
            )
        if self.world_size == 1 or tensor_N.numel() == 0:
            return DONE
        return self._start(
            f"a broadcast from rank {source} of the group",
            tag,
            tensor_N,
            lambda transport, text: transport.broadcast(tensor_N, source, text),
        )

    def all_to_all(
        self,
        output_N: torch.Tensor,
        input_N: torch.Tensor,
        output_numels: Sequence[int] | None = None,
        input_numels: Sequence[int] | None = None,
        *,
        tag: str | int | None = None,
    ) -> Work:
        """Swap parts."""
        _check("all_to_all", output_N, input_N)
        outputs = self._parts("output_numels", output_N, output_numels)
        inputs = self._parts("input_numels", input_N, input_numels)
        if outputs[self.rank].numel() != inputs[self.rank].numel():
            raise CommError(
                f"all_to_all: rank {self.rank} of the group sends itself "
                f"{counted(inputs[self.rank].numel(), 'element')} and expects {outputs[self.rank].numel()}; "
                "output_numels and input_numels must agree"
            )
        if self.world_size == 1:
            return _copied(input_N, output_N)
        return self._start(
            "an all-to-all",
            tag,
            output_N,
            lambda transport, text: transport.all_to_all(outputs, inputs, output_N, input_N, text),
            numel=self.world_size,  # that of the tensors may differ
        )

    def barrier(self) -> None:
        """Wait for every rank of the group; on the host as in other collectives, where one that cannot come is seen."""
        if self.world_size == 1:
            return
        nothing = torch.zeros(1, device="cpu")
        if self.library("cpu") != "gloo":
            torch_dist.barrier(group=self.group, device_ids=barrier_devices(self.group))
        elif isinstance(self._transport_for(nothing), GlooOnHost):
            # gloo ends a process where two all-reduces of different sizes meet
            barrier = Collective("a barrier", 0, nothing.dtype, "")
            self.watch.start(lambda: as_work(torch_dist.barrier(group=self.own_group, async_op=True)), barrier).wait()
        else:
            self.all_reduce(nothing, tag="barrier").wait()

    def abandon(self, works: Sequence[Work], *, failed: bool) -> None:
        """Leave `works` unfinished; see `watch.py`. After a failure the next collective makes new connections."""
        self.watch.abandon(parts_of(works), failed=failed)
        if failed:
            self._forget_connections()

    def epoch(self) -> tuple[str, int]:
        """See `HasEpochs` in `give_up.py`."""
        return self.watch.epoch()

    def join_epoch(self, epoch: int) -> None:
        """See `HasEpochs` in `give_up.py`."""
        self.watch.join_epoch(epoch)
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._is_connected = False
        self.own_group = self.group
        self._transports.clear()
        self.staging = StagingPool(self.staging.limit_bytes)  # works that were left may still write the other's

    def release(self) -> None:
        """Drop the staging memory."""
        self.staging.release()

    def close(self) -> None:
        """This rank leaves the group because it failed; peers that wait for it raise. Waits for nobody."""
        self.abandon([], failed=True)
        if self.library("cpu") == "gloo":
            self.watch.close()

    def library(self, device_type: str) -> str:
        """The library that moves tensors of such a device: "gloo", ..."""
        return self._libraries.get(device_type, self._libraries.get("", ""))

    def transport(self, device_type: str) -> Transport:
        """Return the transport that moves tensors of such a device."""
        library = self.library(device_type)
        if library == "gloo" and device_type == "cpu":
            return GlooOnHost(self.own_group, self.staging)
        return (OnlyAllReduceAndBroadcast if library in _HOST_LIBRARIES else TensorCollectives)(self.own_group)

    def _start(
        self,
        kind: str,
        tag: str | int | None,
        tensor: torch.Tensor,
        call: Callable[[Transport, str], Work],
        numel: int | None = None,
    ) -> Work:
        """Start a collective; over gloo its errors name it, and the rank that failed or what the ranks do instead.

        `numel`: of the tensor on all ranks, where it is not this one's.
        """
        transport = self._transport_for(tensor)
        text = "" if tag is None else str(tag)
        if isinstance(transport, OnlyAllReduceAndBroadcast):
            collective = Collective(kind, tensor.numel() if numel is None else numel, tensor.dtype, text)
            return self.watch.start(lambda: call(transport, text), collective)
        return call(transport, text)

    def _transport_for(self, tensor: torch.Tensor) -> Transport:
        self.connect()
        device_type = tensor.device.type
        transport = self._transports.get(device_type)
        if transport is None:
            transport = self._transports[device_type] = self.transport(device_type)
        return transport

    def _check_shard(self, asked: str, shard_S: torch.Tensor, full_N: torch.Tensor) -> None:
        if shard_S.numel() * self.world_size != full_N.numel():
            raise CommError(
                f"{asked}: a shard of {counted(shard_S.numel(), 'element')} does not fit a full buffer of "
                f"{full_N.numel()} in a group of {counted(self.world_size, 'rank')}; pad the full buffer to "
                f"{counted(self.world_size, 'equal shard')}"
            )

    def _parts(self, argument: str, flat_N: torch.Tensor, numels: Sequence[int] | None) -> Sequence[torch.Tensor]:
        if numels is None and flat_N.numel() % self.world_size == 0:
            numels = [flat_N.numel() // self.world_size] * self.world_size
        if numels is None or len(numels) != self.world_size or sum(numels) != flat_N.numel() or min(numels) < 0:
            raise CommError(
                f"all_to_all: {argument} {list(numels) if numels else numels} do not cut a buffer of {flat_N.numel()} "
                f"elements for {counted(self.world_size, 'rank')}; give one number per rank, and their sum is the "
                "buffer's numel"
            )
        return flat_N.split(list(numels))


def _check(asked: str, *tensors: torch.Tensor) -> None:
    """`CommError` for tensors that break the contract."""
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CommError(
                f"{asked} needs contiguous 1-D tensors, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; pass tensor.view(-1)"
            )
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise CommError(
                f"{asked} needs tensors of one dtype and device, got {tensors[0].dtype} on {tensors[0].device} and "
                f"{tensor.dtype} on {tensor.device}; convert one of them first"
            )


def _copied(source: torch.Tensor, target: torch.Tensor) -> Work:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    return DONE


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
