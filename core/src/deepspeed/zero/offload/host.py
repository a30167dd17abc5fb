"""`HostPlacement` keeps master weights, optimizer states and reduced gradients of the owned shard in host memory.

    device                                   host
    bucket's sum  ------ lane, per bucket --> reduced [S]        while the backward runs
                                              optimizer step     batch by batch
    weights       <----- lane, per batch ---- master weights     while the next batch is updated

The first sum of a step is copied directly to its place. A later sum (stages 2 and 3 reduce after every backward), or a
sum that was reduced in another dtype, is copied to a staging buffer and added by the CPU. The CPU rounds low-precision
weights, so that only half the bytes are copied.

The norm of a sum that is copied directly is computed on the device before the copy, every other norm on the CPU.

Memory for copies is page-locked on request: gradients, staging, and master weights of fp32 weights. Optimizer states
and master weights of low-precision weights are never copied to the device, so they are in ordinary memory.

`HostShards` keeps the shards of parameters in host memory (`offload_param: {"device": "cpu"}`, stage 3).

    host                          device
    shard_S  ---- lane ---------> its part of the whole parameters; an all-gather in the lane fills the rest
    shard_S  <--- the update: a CPU optimizer writes it directly, a device's optimizer through `UpdateOnDevice`

Copy and all-gather are queued in a stream beside the computation, as far ahead as the fetcher prefetches units
(`fetcher.py`). The computation waits for them when a module uses the unit.

Legend: S numel of this rank's shard of a unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.comm.backend import Work
from deepspeed.zero.offload.buffers import BufferRing, CopyLane, HostMemory, Mark
from deepspeed.zero.placement import Keep, OffloadedShard, Placement, ShardHome, exact_norm

if TYPE_CHECKING:
    from deepspeed.zero.unit import ParamShard, Unit


#: sums in flight to host memory at once, and staging buffers for them. One more sum waits for the oldest, unless it
#: needs no buffer and the accelerator itself delays work for which it has no memory
MAX_ARRIVING = 4
#: batches of weights in flight to the device at once, besides the batch that is being updated
MAX_LEAVING = 1


@dataclass(slots=True)
class _HostShard:
    """`_HostShard` holds the reduced gradients of one unit."""

    reduced: Tensor  # [S]
    own: Tensor  # the device's sums, to which a later backward adds (stage 1); empty if it keeps none
    has_sum: bool = False  # of this step
    norm: Tensor | None = None  # of the sum, 0-D on the device; None: compute it here


@dataclass(slots=True)
class _SumUnderWay:
    """`_SumUnderWay` is a sum in flight to host memory."""

    done: Mark
    source: Tensor  # held until `done`, so that its memory does not go back to the allocator
    staged: Tensor | None  # the CPU adds or copies it to `target`; None: copied directly to `target`
    target: Tensor
    adds: bool

    def land(self) -> None:
        self.done.wait_on_host()
        if self.staged is not None and self.adds:
            self.target.add_(self.staged)
        elif self.staged is not None:
            self.target.copy_(self.staged)


class HostPlacement(Placement):
    """`HostPlacement` is a `Placement` in host memory, for an accelerator with its own memory.

    Args:
        accelerator: the accelerator that holds the weights.
        pins: whether to page-lock memory for copies.
    """

    is_offloaded = True
    max_in_flight = 2

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool) -> None:
        super().__init__()
        self._memory = HostMemory(accelerator, pins=pins)
        self._lane = CopyLane(accelerator)
        #: sums that wait for their copy hold device memory; staged sums also hold the few staging buffers
        self._is_bounded = not accelerator.handles_memory_backpressure()
        self._incoming = BufferRing(self._memory, MAX_ARRIVING)
        self._outgoing = BufferRing(self._memory, 1 + MAX_LEAVING)
        self._host_shards: dict[int, _HostShard] = {}  # by unit
        self._arrivals: deque[_SumUnderWay] = deque()
        self._was_changed = False  # gradients were written from outside, so the device's norms are invalid
        self._sent: Mark | None = None

    @staticmethod
    def is_needed(device: torch.device) -> bool:
        """Return whether host memory is other memory than the memory of `device`."""
        return device.type != "cpu"

    # ---- memory -------------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, *, crosses: bool) -> Tensor:
        return self._memory.allocate(numel, dtype, crosses=crosses)

    def home_of_gradients(self, unit: Unit, own_S: Tensor) -> Tensor:
        reduced_S = self._memory.allocate(unit.layout.shard_numel, own_S.dtype)
        self._host_shards[unit.index] = _HostShard(reduced_S, own_S)
        return reduced_S

    @property
    def held_bytes(self) -> int:
        return self._incoming.held_bytes + self._outgoing.held_bytes

    def release(self) -> None:
        self.forget()
        self.finish_sending()
        self._incoming.release()
        self._outgoing.release()

    # ---- gradients arrive ---------------------------------------------------------------------------------------

    def keeper(self, *, adds: bool) -> Keep | None:
        return partial(self._receive, adds)

    def _receive(self, adds: bool, index: int, work: Work, source: Tensor) -> Mark:
        host_shard = self._host_shards[index]
        target = host_shard.reduced
        adds = adds and host_shard.has_sum
        is_straight = target.dtype == source.dtype and not adds
        while len(self._arrivals) >= MAX_ARRIVING and (self._is_bounded or not is_straight):
            self._arrivals.popleft().land()
        with self._lane.copying():
            work.wait()  # on a device only the lane waits, and the computation goes on
            host_shard.has_sum, host_shard.norm = True, exact_norm(source) if is_straight else None
            staged = None if is_straight else self._incoming.take(source.numel(), source.dtype)
            (target if staged is None else staged).copy_(source, non_blocking=True)
        done = self._lane.mark()
        self._arrivals.append(_SumUnderWay(done, source, staged, target, adds))
        return done

    def settle(self) -> None:
        while self._arrivals:
            self._arrivals.popleft().land()

    def norms(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        if self._was_changed:
            return super().norms(reduced)
        return [
            exact_norm(host_shard.reduced) if host_shard.norm is None else host_shard.norm
            for host_shard in self._host_shards.values()
            if host_shard.has_sum
        ]

    def gradients_changed(self) -> None:
        self._was_changed = True
        for host_shard in self._host_shards.values():
            if host_shard.own.numel() > 0:  # else the next backward would restore the former sums
                host_shard.own.copy_(host_shard.reduced)

    def forget(self) -> None:
        self.settle()
        for host_shard in self._host_shards.values():
            host_shard.has_sum, host_shard.norm = False, None
        self._was_changed = False

    # ---- weights leave ------------------------------------------------------------------------------------------

    def copies(self, shards: Sequence[ParamShard]) -> list[Tensor]:
        if not shards or shards[0].weight.dtype == shards[0].master.dtype:
            return []
        numels = [shard.fragment.numel if shard.stored is None else 0 for shard in shards]
        staged = self._outgoing.take(sum(numels), shards[0].weight.dtype)
        return [
            (part if shard.stored is None else shard.stored.target()).view(shard.master.shape)
            for part, shard in zip(staged.split(numels), shards, strict=True)
        ]

    def send(self, shards: Sequence[ParamShard], copies: Sequence[Tensor]) -> None:
        sources = list(copies) or [shard.master for shard in shards]
        pairs = []
        for shard, source in zip(shards, sources, strict=True):
            if shard.stored is None:
                pairs.append((shard, source))
            elif copies or not self.fetches:
                shard.stored.store(source)
            else:  # `source` is overwritten soon, while `stored` still writes
                shard.stored.store(shard.stored.target().copy_(source.detach().view(-1)))
        if not pairs:
            return
        shards, sources = [shard for shard, _ in pairs], [source for _, source in pairs]
        with self._lane.copying():
            for start, stop in _runs(shards):
                numel = sum(shard.fragment.numel for shard in shards[start:stop])
                stretched(shards[start].weight, numel).copy_(stretched(sources[start], numel), non_blocking=True)
        self._sent = self._lane.mark()
        if copies:
            self._outgoing.hold(self._outgoing.place, self._sent)
        self._sent.wait()  # on the device: all-gathers and computations with these weights run after the copy

    def finish_sending(self) -> None:
        if self._sent is not None:
            self._sent.wait_on_host()
            self._sent = None


def _runs(shards: Sequence[ParamShard]) -> list[tuple[int, int]]:
    """Return ranges of `shards` that are contiguous in one unit's buffer; each is copied at once."""
    breaks = [i for i in range(1, len(shards)) if not _follows(shards[i - 1], shards[i])]
    return list(zip([0, *breaks], [*breaks, len(shards)], strict=True))


def _follows(one: ParamShard, other: ParamShard) -> bool:
    address = other.weight.untyped_storage().data_ptr()
    return one.fragment.stop == other.fragment.start and one.weight.untyped_storage().data_ptr() == address


def stretched(first: Tensor, numel: int) -> Tensor:
    """Return `numel` elements of the buffer of which `first` is a view, starting where `first` starts."""
    return first.detach().as_strided((numel,), (1,), first.storage_offset())


class _HostWeights(OffloadedShard):
    def __init__(self, shard_S: Tensor, lane: CopyLane) -> None:
        super().__init__(shard_S)
        self._lane = lane
        self._sent: Mark | None = None  # after the latest copy and the work that was issued with it

    def prepare(self) -> None:
        """Do nothing: the values are in memory."""

    @contextmanager
    def copied_to(self, part_S: Tensor) -> Iterator[None]:
        with self._lane.copying():
            part_S.copy_(self.shard_S, non_blocking=True)
            yield
        self._sent = self._lane.mark()

    def arrived(self) -> None:
        if self._sent is not None:
            self._sent.wait()

    def settle(self) -> None:
        if self._sent is not None:
            self._sent.wait_on_host()
            self._sent = None

    def load(self, start: int, numel: int) -> Tensor:
        return self.shard_S.narrow(0, start, numel)

    def target(self, start: int, numel: int) -> Tensor:
        return self.load(start, numel)

    def store(self, start: int, values: Tensor) -> None:
        own = self.load(start, values.numel())
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)


class HostShards(ShardHome):
    """`HostShards` keeps the shards of parameters in host memory.

    Args:
        accelerator: the accelerator that gathers; its memory is not host memory.
        pins: whether to page-lock the shards, so that the device copies them beside its computation.
    """

    name = "cpu"

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool) -> None:
        self._memory = HostMemory(accelerator, pins=pins, key="offload_param")
        self._lane = CopyLane(accelerator)

    def keep(self, values_S: Tensor, name: str) -> OffloadedShard:
        shard_S = self._memory.allocate(values_S.numel(), values_S.dtype)
        return _HostWeights(shard_S.copy_(values_S), self._lane)

    def release(self) -> None:
        """Do nothing: only the units hold their shards."""


class UpdateOnDevice(Placement):
    """`UpdateOnDevice` keeps master weights, states and gradients on the device; updated weights are offloaded."""

    def copies(self, shards: Sequence[ParamShard]) -> list[Tensor]:
        if not shards or shards[0].weight.dtype == shards[0].master.dtype:
            return []
        return [
            shard.weight if shard.stored is None else torch.empty_like(shard.master, dtype=shard.weight.dtype)
            for shard in shards
        ]

    def send(self, shards: Sequence[ParamShard], copies: Sequence[Tensor]) -> None:
        for shard, source in zip(shards, copies or [shard.master for shard in shards], strict=True):
            if shard.stored is not None:
                shard.stored.store(source)
