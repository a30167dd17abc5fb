"""`HostShards`: the shards of sharded parameters in host memory (`offload_param: {"device": "cpu"}`, stage 3).

    host                          device
    shard_S  ---- lane ---------> its part of the whole parameters, which an all-gather in the lane completes
    shard_S  <--- the update: a host's optimizer writes it (`host.py`), a device's with `UpdateOnDevice`

Copy and all-gather are queued in a stream beside the computation, as far ahead as units are gathered ahead
(`fetcher.py`). The computation waits for them when a module uses the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.lane import CopyLane, Mark
from deepspeed.zero.placement import Placement
from deepspeed.zero.shard_home import OffloadedShard, ShardHome

if TYPE_CHECKING:
    from deepspeed.zero.flat_group import ParamShard


class _HostShard(OffloadedShard):
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
    """Args:
    accelerator: the one that gathers; its memory is not the host's.
    pins: whether the shards are page-locked, so that the device copies them beside its computation.
    """

    name = "cpu"

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool) -> None:
        self._memory = HostMemory(accelerator, pins=pins, key="offload_param")
        self._lane = CopyLane(accelerator)

    def keep(self, values_S: Tensor, name: str) -> OffloadedShard:
        shard_S = self._memory.allocate(values_S.numel(), values_S.dtype)
        return _HostShard(shard_S.copy_(values_S), self._lane)

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
