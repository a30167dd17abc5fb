"""`HostPlacement`: master weights, optimizer states and reduced gradients of the owned shard in host memory.

    device                                   host
    bucket's sum  ------ lane, per bucket --> reduced [S]        while the backward runs
                                              optimizer step     batch by batch
    weights       <----- lane, per batch ---- master weights     while the next batch is updated

A sum that is the first of its step is copied straight to its place. A later one (stages 2 and 3 reduce after
every backward) is copied to a staging buffer and added by the host, as is one that was reduced in another dtype.
Low-precision weights are rounded by the host, so that half the bytes cross.

The norm is taken where the sum is at hand: of what is copied straight, on the device before it leaves; else here.

Memory that crosses is page-locked on request: gradients, staging, and master weights of fp32 weights. Optimizer states
and master weights of low-precision weights never cross, and are plain.

`HostShards`: the shards of sharded parameters in host memory (`offload_param: {"device": "cpu"}`, stage 3).

    host                          device
    shard_S  ---- lane ---------> its part of the whole parameters, which an all-gather in the lane completes
    shard_S  <--- the update: a host's optimizer writes it, a device's with `UpdateOnDevice`

Copy and all-gather are queued in a stream beside the computation, as far ahead as units are gathered ahead
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


#: sums in flight to the host at the same time, and so staging buffers for them; one more waits for the oldest,
#: unless it needs no buffer and the accelerator itself holds back what its memory has no room for
MAX_ARRIVING = 4
#: batches of weights on their way to the device at the same time, besides the one that is being updated
MAX_LEAVING = 1


@dataclass(slots=True)
class _HostShard:
    """The reduced gradients of one unit."""

    reduced: Tensor  # [S]
    own: Tensor  # the device's sums, to which a later backward adds (stage 1); empty where it keeps none
    has_sum: bool = False  # of this step
    norm: Tensor | None = None  # of the sum, 0-D on the device; None: to be taken here


@dataclass(slots=True)
class _SumUnderWay:
    """A sum on its way."""

    done: Mark
    source: Tensor  # held until then: its memory may not go back to the allocator before
    staged: Tensor | None  # to be put into `target` by the host; None: copied straight there
    target: Tensor
    adds: bool

    def land(self) -> None:
        self.done.wait_on_host()
        if self.staged is not None and self.adds:
            self.target.add_(self.staged)
        elif self.staged is not None:
            self.target.copy_(self.staged)


class HostPlacement(Placement):
    """`HostPlacement` keeps what a `Placement` does in host memory, beside an accelerator with a memory of its own.

    Args:
        accelerator: the one that holds the weights.
        pins: whether memory that crosses is page-locked.
    """

    is_offloaded = True
    max_in_flight = 2

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool) -> None:
        super().__init__()
        self._memory = HostMemory(accelerator, pins=pins)
        self._lane = CopyLane(accelerator)
        #: sums that wait for their copy hold the device's memory; staged ones also the few staging buffers
        self._is_bounded = not accelerator.handles_memory_backpressure()
        self._incoming = BufferRing(self._memory, MAX_ARRIVING)
        self._outgoing = BufferRing(self._memory, 1 + MAX_LEAVING)
        self._host_shards: dict[int, _HostShard] = {}  # by unit
        self._arrivals: deque[_SumUnderWay] = deque()
        self._was_changed = False  # gradients were written from outside: norms of the device are void
        self._sent: Mark | None = None

    @staticmethod
    def is_needed(device: torch.device) -> bool:
        """Whether host memory is another memory than that of `device`."""
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
            work.wait()  # here: it is the lane that waits on a device, the computation goes on
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
            if host_shard.own.numel() > 0:  # else the next backward would bring the former sums again
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
            else:  # written meanwhile, and `source` gets other values soon
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
        self._sent.wait()  # on the device: what gathers these weights, or computes with them, comes after

    def finish_sending(self) -> None:
        if self._sent is not None:
            self._sent.wait_on_host()
            self._sent = None


def _runs(shards: Sequence[ParamShard]) -> list[tuple[int, int]]:
    """Ranges of `shards` that follow each other in the buffer of one unit, each copied in one go."""
    breaks = [i for i in range(1, len(shards)) if not _follows(shards[i - 1], shards[i])]
    return list(zip([0, *breaks], [*breaks, len(shards)], strict=True))


def _follows(one: ParamShard, other: ParamShard) -> bool:
    address = other.weight.untyped_storage().data_ptr()
    return one.fragment.stop == other.fragment.start and one.weight.untyped_storage().data_ptr() == address


def stretched(first: Tensor, numel: int) -> Tensor:
    """`numel` elements of the buffer that `first` is a view of, from its beginning on."""
    return first.detach().as_strided((numel,), (1,), first.storage_offset())


class _HostWeights(OffloadedShard):
    def __init__(self, shard_S: Tensor, lane: CopyLane) -> None:
        super().__init__(shard_S)
        self._lane = lane
        self._sent: Mark | None = None  # after the latest copy, and what was issued with it

    def prepare(self) -> None:
        """They are there."""

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
        accelerator: the accelerator that gathers; its memory is not the host's.
        pins: whether the shards are page-locked, so that the device copies them beside its computation.
    """

    name = "cpu"

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool) -> None:
        self._memory = HostMemory(accelerator, pins=pins, key="offload_param")
        self._lane = CopyLane(accelerator)

    def keep(self, values_S: Tensor, name: str) -> OffloadedShard:
        shard_S = self._memory.allocate(values_S.numel(), values_S.dtype)
        return _HostWeights(shard_S.copy_(values_S), self._lane)

    def release(self) -> None:
        """The units hold their shards, and nothing else does."""


class UpdateOnDevice(Placement):
    """Master weights, states and gradients on the device, and offloaded weights, which get what was updated."""

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
