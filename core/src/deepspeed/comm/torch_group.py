"""`TorchGroup` is the `GroupBackend` over torch.distributed, for a process group of any library. `group_backend(group)`
chooses the `GroupBackend` of a process group and creates it once.

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
from deepspeed.comm.record import RecordedGroup, comms_logger, waits
from deepspeed.comm.transports import GlooOnHost, OnlyAllReduceAndBroadcast, StagingPool, TensorCollectives, Transport
from deepspeed.comm.watch import CARRIER_NUMEL, Collective, Watch
from deepspeed.errors import CommError, PluginError, counted
from deepspeed.log import warn_once
from deepspeed.ops.implementations import HOST
from deepspeed.plugins import plugin_manager

# Two buckets of the preferred size, kept between steps: allocating fresh memory costs more than the sum itself.
DEFAULT_STAGING_BYTES = 16 << 20
# Libraries that complete on the host, with no reduce-scatter and all-gather of whole tensors, or only slow ones.
_HOST_LIBRARIES = ("gloo", "mpi")


class TorchGroup:
    """The collectives of one process group of torch.distributed.

    Args:
        group: a process group that includes this process.
        staging_bytes: limit on the memory that is kept to receive values before they are summed.
    """

    def __init__(self, group: ProcessGroup, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        self.group = group
        self.own_group = group  # the group in which the collectives run; `connect` may replace it
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
        """The capabilities of the library for the group's device, or for host memory if the group has no device.

        Buckets have 64 MiB on a device: launching a bucket costs the host as much as the backward of a layer, and a
        block of up to 16 million elements is one unit of stage 3. They have 8 MiB for up to 8 ranks of a host library:
        larger buckets hardly lower the cost per byte, and lengthen the wait for the last bucket. An all-reduce of two
        ranks has 16 MiB: gloo steps are 3% faster than with 4 MiB.
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
        """Create a separate process group for these collectives if the library needs one; see `own_group.py`."""
        if self._is_connected:
            return
        self.own_group = self.watch.connect()
        self._is_connected = True

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialized 1-D tensor from torch's allocator."""
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
        """Sum a few values; over gloo on the host, also compare checksums of the collectives issued before."""
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
        """Exchange parts."""
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
            numel=self.world_size,  # the numels of the tensors may differ between ranks
        )

    def barrier(self) -> None:
        """Wait for every rank of the group; over gloo like other collectives, so a rank that cannot come is noticed."""
        if self.world_size == 1:
            return
        nothing = torch.zeros(1, device="cpu")
        if self.library("cpu") != "gloo":
            torch_dist.barrier(group=self.group, device_ids=barrier_devices(self.group))
        elif isinstance(self._transport_for(nothing), GlooOnHost):
            # not an all-reduce: gloo aborts the process if it pairs all-reduces of different sizes
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
        self.staging = StagingPool(self.staging.limit_bytes)  # abandoned works may still write the old pool's buffers

    def release(self) -> None:
        """Drop the staging memory."""
        self.staging.release()

    def close(self) -> None:
        """Leave the group because this rank failed; peers that wait for this rank raise. Does not block."""
        self.abandon([], failed=True)
        if self.library("cpu") == "gloo":
            self.watch.close()

    def library(self, device_type: str) -> str:
        """Return the library that moves tensors of this device type: "gloo", ..."""
        return self._libraries.get(device_type, self._libraries.get("", ""))

    def transport(self, device_type: str) -> Transport:
        """Return the transport that moves tensors of this device type."""
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
        """Start a collective. Over gloo and MPI, its errors name the collective, and the rank that failed or how the
        ranks differ. `numel`: a number that is equal on all ranks, if the numel of `tensor` is not."""
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
    """Raise `CommError` for tensors that violate the contract of `GroupBackend`."""
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
# The function that makes all backends; None: choose per group.
_make: Callable[[ProcessGroup], GroupBackend] | None = None
# The world group of these backends: a new world, also one that other code made, gets new backends.
_world: ProcessGroup | None = None


def group_backend(group: ProcessGroup | None = None) -> GroupBackend:
    """Return the backend of `group`. All ranks of the group call it in the same order, while they build an engine.

    While the comms logger is on or waits are watched, the result is a `RecordedGroup`.

    Args:
        group: a process group that includes this process; None: all ranks.

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
    """Return `group_backend(group)`, for a caller that runs only barriers."""
    own = _current_world() if group is None else group
    is_asked = own in _backends and own not in _for_barriers
    backend = group_backend(group)
    if own is not None and not is_asked:
        _for_barriers.add(own)
    return backend


def makes_collectives(backend: GroupBackend) -> bool:
    """Whether `group_backend` was called for the group of `backend`, not only `backend_for_barriers`."""
    return backend.group not in _for_barriers


def known_backends() -> list[GroupBackend]:
    """Return the backends that were made for groups of the current world."""
    return list(_backends.values()) if _world is _current_world() else []


def forget(group: ProcessGroup | None = None, *, failed: bool = False) -> None:
    """Release and drop the backend of `group` (None: all groups).

    `destroy_process_group` and tests call it. `failed`: peers that wait for this rank raise.
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
    """Use `make` to create the backends of the current world's groups; None: choose per group again."""
    global _make, _world
    forget()
    _make, _world = make, _current_world()


def plugin_backend(name: str, group: ProcessGroup | None) -> GroupBackend | None:
    """Ask plugins for the backend of `group` over the library `name`. The hook is called once per group, never per
    bucket.

    The active plugins are asked first, then the host extension, whichever accelerator was chosen.
    """
    get_accelerator()  # activates the accelerator's plugin, which is asked, too
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
    """Return the name by which plugins know the library of `group`.

    The name is "gloo" if gloo serves the host, even with another library for the device: a host plugin serves both.
    """
    return "gloo" if library_by_device(group).get("cpu") == "gloo" else str(torch_dist.get_backend(group))
