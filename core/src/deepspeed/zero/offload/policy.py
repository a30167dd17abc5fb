"""Choose where an engine keeps offloaded data, from `offload_optimizer`, `offload_param` and the accelerator.

The builders in `engine/` call these functions once; `zero.Init` also calls `choose_shard_home`. `SplitPlacement` is
used if `ratio` leaves a part of the parameters beside the weights.

`SwappedShards` keeps the shards of parameters in a swap file (`offload_param: {"device": "nvme"}`, stage 3).

    file    ---- read ahead ----> a buffer in host memory ---- lane ----> this rank's part of the whole weights
    file    <--- write ---------- the updated weights

A shard has no memory of its own. It is read into one of `buffer_count` buffers before its all-gather, as far ahead as
there are buffers, in the order of the last use of units (`fetcher.py`), so reads overlap the computation. The buffer is
free again after its values were copied. The update stores its results part by part; they are written while it goes on,
and a read waits until all writes are done. The first units, up to `max_in_cpu` elements, stay in memory.

Legend: S numel of a shard.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.config.training import AioConfig
from deepspeed.config.zero import OffloadOptimizerConfig, OffloadParamConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.log import log_dist, warn_once
from deepspeed.zero.offload.buffers import CopyLane, HostMemory, Mark
from deepspeed.zero.offload.host import HostPlacement, HostShards, UpdateOnDevice
from deepspeed.zero.offload.nvme import NvmePlacement
from deepspeed.zero.offload.swap_file import Region, SwapFile, SwapFolder, SwapQueue, SwapWork
from deepspeed.zero.placement import OffloadedShard, Placement, ShardHome


class SplitPlacement(Placement):
    """`SplitPlacement` gives each unit one of two placements; calls for all units go to both.

    Units are not divided, so `ratio` is met as closely as their sizes permit.

    Args:
        offloaded: placement of the offloaded part.
        near: placement of the rest.
        ratio: the offloaded fraction of all elements, 0 to 1.
    """

    is_offloaded = True

    def __init__(self, offloaded: Placement, near: Placement, ratio: float) -> None:
        super().__init__()
        self._offloaded, self._near, self._ratio = offloaded, near, ratio
        self.fetches = offloaded.fetches
        self.max_in_flight = offloaded.max_in_flight
        self._is_near: list[bool] = []  # by unit
        self._numel = self._offloaded_numel = 0  # of the units so far

    def of_unit(self, numel: int) -> Placement:
        self._numel += numel
        is_near = self._offloaded_numel + numel / 2 > self._ratio * self._numel
        self._is_near.append(is_near)
        self._offloaded_numel += 0 if is_near else numel
        return self._near if is_near else self._offloaded

    def prepare(
        self, optimizer: Optimizer, numel: int, gradient_dtype: torch.dtype, *, max_sub_group_numel: int
    ) -> None:
        part = int(numel * self._ratio)
        self._offloaded.prepare(optimizer, part, gradient_dtype, max_sub_group_numel=max_sub_group_numel)

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._offloaded.scratch(numel, dtype, device)

    def settle(self) -> None:
        self._offloaded.settle()

    def norms(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        near = [gradients for gradients, is_near in zip(reduced, self._is_near, strict=True) if is_near]
        offloaded = [gradients for gradients, is_near in zip(reduced, self._is_near, strict=True) if not is_near]
        return self._near.norms(near) + self._offloaded.norms(offloaded)

    def gradients_changed(self) -> None:
        self._offloaded.gradients_changed()

    def finish_sending(self) -> None:
        self._offloaded.finish_sending()

    def forget(self) -> None:
        self._offloaded.forget()

    @property
    def held_bytes(self) -> int:
        return self._offloaded.held_bytes

    def release(self) -> None:
        self._offloaded.release()


def asks_for_host(offload: OffloadOptimizerConfig | None, stage: int) -> bool:
    """Return whether the section requests updates in host memory, at a stage that supports them."""
    return stage > 0 and offload is not None and offload.device in ("cpu", "nvme") and offload.ratio > 0


def choose_shard_home(
    offload: OffloadParamConfig | None,
    aio: AioConfig,
    *,
    device: torch.device,
    stage: int = 3,
    keeps_int8: bool = False,
) -> ShardHome | None:
    """Choose where parameter shards are kept for an engine on `device`; None: on that device.

    Below stage 3 no parameter is sharded, and the section has no effect, as in DeepSpeed: scripts set it at every
    stage.

    Args:
        keeps_int8: `zero_quantized_nontrainable_weights`.

    Raises:
        ConfigError: for offload with `keeps_int8`; names the alternatives.
    """
    if offload is None or offload.device == "none":
        return None
    if stage < 3:
        warn_once(
            f"zero_optimization.offload_param: has no effect at stage {stage}, which shards no parameters; they stay "
            "on the device. To offload them set stage to 3"
        )
        return None
    is_needed = HostPlacement.is_needed(device)
    if offload.device == "cpu" and not is_needed:
        log_dist("zero_optimization.offload_param: the accelerator's memory is the host's; nothing moves")
        return None
    if keeps_int8:
        raise ConfigError(
            f"zero_optimization.offload_param.device: found {offload.device!r} with "
            "zero_quantized_nontrainable_weights true, whose int8 shards stay on the device; set device to "
            '"none", or the other key to false'
        )
    pins = offload.pin_memory and is_needed
    memory = HostShards(get_accelerator(), pins=pins) if is_needed else None
    if offload.device == "cpu":
        return memory
    rank = torch.distributed.get_rank()
    return SwappedShards(get_accelerator(), offload, aio, memory=memory, pins=pins, rank=rank)


def choose_placement(
    offload: OffloadOptimizerConfig | None,
    *,
    stage: int,
    device: torch.device,
    home: ShardHome | None = None,
    aio: AioConfig | None = None,
    rank: int = 0,
) -> Placement:
    """Choose the placement for an engine on `device`, whose parameter shards are kept at `home`.

    At stage 0 the section has no effect, as in DeepSpeed: scripts set it at every stage.

    Args:
        aio: how swap files are read and written.
        rank: rank of this process, for the name of its swap folder.

    Raises:
        ConfigError: if the offload folder cannot be used.
        OpUnavailable: if no extension reads and writes files for offload to NVMe.
    """
    if offload is not None and offload.device != "none" and stage == 0:
        warn_once(
            "zero_optimization.offload_optimizer: has no effect at stage 0, which shards no optimizer states; they "
            "stay on the device and are updated there. To offload them set stage to 1, 2 or 3"
        )
    if offload is None or not asks_for_host(offload, stage):
        return Placement() if home is None else UpdateOnDevice()
    if offload.device == "nvme":
        return _in_part(_on_nvme(offload, aio or AioConfig(), rank), offload.ratio, home)
    if not HostPlacement.is_needed(device):
        log_dist("zero_optimization.offload_optimizer: the accelerator's memory is the host's; nothing moves")
        memory = HostMemory(get_accelerator(), pins=offload.pin_memory)
        return Placement(memory) if home is None else UpdateOnDevice(memory)
    return _in_part(HostPlacement(get_accelerator(), pins=offload.pin_memory), offload.ratio, home)


def _in_part(offloaded: Placement, ratio: float, home: ShardHome | None) -> Placement:
    near = Placement() if home is None else UpdateOnDevice()
    return SplitPlacement(offloaded, near, ratio) if ratio < 1 else offloaded


def _on_nvme(offload: OffloadOptimizerConfig, aio: AioConfig, rank: int) -> Placement:
    if not offload.nvme_path:
        raise ConfigError(
            'zero_optimization.offload_optimizer.nvme_path: found none with device "nvme"; name a folder on a '
            "local disk"
        )
    return NvmePlacement(
        get_accelerator(),
        offload.nvme_path,
        rank=rank,
        aio=aio,
        pins=offload.pin_memory,
        reads_ahead=offload.pipeline_read,
        writes_behind=offload.pipeline_write,
        buffer_count=offload.buffer_count,
    )


_KEY = "zero_optimization.offload_param.nvme_path"


class _ReadBuffer:
    """`_ReadBuffer` is memory into which one shard at a time is read."""

    def __init__(self, memory: HostMemory, aio: AioConfig) -> None:
        self._memory = memory
        self._queue = SwapQueue(aio)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._read: SwapWork | None = None
        self._copied: Mark | None = None  # after the latest copy out of the buffer
        self.owner: _SwappedShard | None = None  # the shard whose values are or will be in the buffer

    def begin(self, owner: "_SwappedShard", region: Region) -> None:
        """Start to read the values of `owner`."""
        if self._copied is not None:
            self._copied.wait_on_host()
        if self._bytes.numel() < region.num_bytes:
            self._bytes = self._memory.aligned(region.num_bytes)
        self._read = self._queue.read(region, self._bytes[: region.num_bytes])
        self.owner = owner

    def finish(self) -> None:
        """Return when the values have been read; raise OSError if they cannot be read."""
        assert self._read is not None
        self._read.wait()

    def values(self, like_S: Tensor) -> Tensor:
        """Return the values as a tensor of the dtype and size of `like_S`."""
        return self._bytes[: like_S.nbytes].view(like_S.dtype)

    def free(self, copied: Mark | None = None) -> None:
        """Free the buffer; its values are not needed after `copied`."""
        self._queue.finish()
        self._copied, self.owner = copied, None


class _SwappedShard(OffloadedShard):
    """`_SwappedShard` is a shard in a swap file; `shard_S` is on the meta device."""

    def __init__(self, home: "SwappedShards", region: Region, shard_S: Tensor) -> None:
        super().__init__(shard_S)
        self._home, self._region = home, region
        self._buffer: _ReadBuffer | None = None
        self._sent: Mark | None = None

    def read_ahead(self) -> bool:
        if self._buffer is None and (buffer := self._home.free_buffer()) is not None:
            self._begin(buffer)
        return self._buffer is not None

    def _begin(self, buffer: _ReadBuffer) -> None:
        self._home.require_stored(self._region)
        buffer.begin(self, self._region)
        self._buffer = buffer

    def prepare(self) -> None:
        if self._buffer is None:
            self._begin(self._home.any_buffer())
        assert self._buffer is not None
        try:
            self._buffer.finish()
        except OSError:
            self.drop()
            raise

    @contextmanager
    def copied_to(self, part_S: Tensor) -> Iterator[None]:
        assert self._buffer is not None, "prepare comes before"
        with self._home.lane.copying():
            part_S.copy_(self._buffer.values(self.shard_S), non_blocking=True)
            yield
        self._sent = self._home.lane.mark()
        self.drop(self._sent)

    def arrived(self) -> None:
        if self._sent is not None:
            self._sent.wait()

    def drop(self, copied: Mark | None = None) -> None:
        """Return the buffer after the copy that reads it is done."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.free(copied)

    def settle(self) -> None:
        self.drop()
        self._home.finish_storing()

    def load(self, start: int, numel: int) -> Tensor:
        values = self.target(start, numel)
        self._home.read(self._region, values, start * values.itemsize)
        return values

    def target(self, start: int, numel: int) -> Tensor:
        itemsize = self.shard_S.itemsize
        return self._home.plain.aligned(numel * itemsize, start * itemsize).view(self.shard_S.dtype)

    def store(self, start: int, values: Tensor) -> None:
        self._home.write(self._region, values.to("cpu", self.shard_S.dtype), start * self.shard_S.itemsize)


class _Storing(NamedTuple):
    """`_Storing` is a write of the bytes [first, stop) in flight, with the memory that is written."""

    work: SwapWork
    values: Tensor
    first: int
    stop: int


class SwappedShards(ShardHome):
    """`SwappedShards` keeps the shards of parameters in a swap file.

    Args:
        accelerator: the accelerator that gathers.
        section: `offload_param`, with an `nvme_path`.
        aio: how the file is read and written.
        memory: keeps shards of at most `max_in_cpu` elements in total; None: these stay beside the whole parameters.
        pins: whether the buffers for reads are page-locked.
        rank: rank of this process, for the name of its folder.

    Raises:
        ConfigError: if there is no `nvme_path`, or nothing can be written there.
    """

    name = "nvme"

    def __init__(
        self,
        accelerator: DeepSpeedAccelerator,
        section: OffloadParamConfig,
        aio: AioConfig,
        *,
        memory: ShardHome | None,
        pins: bool,
        rank: int,
    ) -> None:
        if not section.nvme_path:
            raise ConfigError(f"{_KEY}: found none, and device is 'nvme'; name a folder on a local disk")
        self.lane = CopyLane(accelerator)
        self._max_numel = section.buffer_size
        self._room_numel = section.max_in_cpu
        self._memory = memory
        self._folder = SwapFolder(section.nvme_path, rank=rank, key=_KEY)
        self._file = SwapFile(self._folder.path / "parameters.swap")
        staging = HostMemory(accelerator, pins=pins, key="offload_param")
        self.plain = HostMemory(accelerator, pins=False)  # for memory that the device does not copy
        self._max_buffers = section.buffer_count
        self._new_buffer = partial(_ReadBuffer, staging, aio)
        self._buffers: list[_ReadBuffer] = []  # created on demand
        self._reads, self._writes = SwapQueue(aio), SwapQueue(aio)
        self._storing: list[_Storing] = []
        #: by first byte and end: failed writes that were not repeated
        self._failed: dict[tuple[int, int], OSError] = {}

    def keep(self, values_S: Tensor, name: str) -> OffloadedShard | None:
        numel = values_S.numel()
        if numel <= self._room_numel:
            self._room_numel -= numel
            return None if self._memory is None else self._memory.keep(values_S, name)
        if numel > self._max_numel:
            raise ConfigError(
                f"zero_optimization.offload_param.buffer_size: found {counted(self._max_numel, 'element')}, and this "
                f"rank's shard of {name} and what is gathered with it has {numel}; make it at least as large"
            )
        shard = _SwappedShard(self, self._file.allocate(values_S.nbytes), torch.empty_like(values_S, device="meta"))
        shard.store(0, shard.target(0, numel).copy_(values_S))
        return shard

    def free_buffer(self) -> _ReadBuffer | None:
        """Return a buffer without an owner, or None."""
        found = next((buffer for buffer in self._buffers if buffer.owner is None), None)
        if found is None and len(self._buffers) < self._max_buffers:
            self._buffers.append(found := self._new_buffer())
        return found

    def any_buffer(self) -> _ReadBuffer:
        """Return a free buffer; if there is none, drop the values that were read ahead last."""
        buffer = self.free_buffer() or self._buffers[-1]
        if buffer.owner is not None:
            buffer.owner.drop()
        return buffer

    def read(self, region: Region, values: Tensor, start: int) -> None:
        """Fill `values` from the region, starting at its byte `start`."""
        self.require_stored(region)
        self._reads.read(region, values, start).wait()

    def write(self, region: Region, values: Tensor, start: int) -> None:
        """Start to write `values` to the region, starting at its byte `start`."""
        if len(self._storing) >= self._max_buffers:
            self.finish_storing()
        first = region.offset + start
        stop = first + values.nbytes
        try:
            self._storing.append(_Storing(self._writes.write(region, values, start), values, first, stop))
        except OSError as error:
            self._failed[first, stop] = error
            raise

    def finish_storing(self) -> None:
        """Return when all values passed to `write` are in the file and may be changed.

        Raises:
            OSError: if one of the writes failed.
        """
        storing, self._storing = self._storing, []
        self._writes.finish()
        error: OSError | None = None
        for write in storing:
            for first, stop in list(self._failed):
                if write.first <= first and stop <= write.stop:
                    del self._failed[first, stop]
            try:
                write.work.wait()
            except OSError as found:
                self._failed[write.first, write.stop] = error = error or found
        if error is not None:
            raise error

    def require_stored(self, region: Region) -> None:
        """Return when the region has the values that were passed to `write` last.

        Raises:
            OSError: if a write of the region failed, or one for which this call has waited.
        """
        self.finish_storing()
        for (first, stop), error in self._failed.items():
            if first < region.offset + region.num_bytes and region.offset < stop:
                raise error

    def check(self) -> None:
        self.finish_storing()
        for error in self._failed.values():
            raise error
        self._file.check("read", 0, self._file.num_bytes)

    def release(self) -> None:
        self._writes.finish()
        for buffer in self._buffers:
            buffer.free()
        self._buffers, self._storing = [], []
        self._folder.remove()
