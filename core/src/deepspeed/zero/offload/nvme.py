"""`NvmePlacement` keeps master weights, optimizer states and reduced gradients of the owned shard in a swap file.

    device                        host                                  disk
    bucket's sum  --- copy -->    staging buffer   --- write -->        gradients [S]      while the backward runs
                                  slot of a sub-group  <-- read ---     masters, states, gradients
                                  optimizer step                        sub-group by sub-group
    weights       <-- copy ---    slot             --- write -->        masters, states, if another group needs the slot

Between steps, master weights, states and reduced gradients have no memory: the tensor objects stay in the optimizer's
groups and state, and are empty. `fetch` points the tensors of one sub-group at a slot with its values; `store` empties
them. A few sub-groups stay in the slots after the update. The next update begins with them, their gradients go directly
to the slots, and their values are written only when another sub-group needs the slot (`swap_slots.py`).
States without one number per element (`step`, factored moments) stay in memory.

The norm of a sum is computed before the sum is written. Swap files do not outlive the run (`swap_file.py`).
ZeRO-Infinity: arXiv 2104.07857, sections 5.1.1 and 5.2.2.

Legend: S numel of this rank's shard of a unit.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.comm.backend import Work
from deepspeed.config.training import AioConfig
from deepspeed.log import warn_once
from deepspeed.ops.aio import preflight
from deepspeed.optim.saved_state import num_states
from deepspeed.zero.offload.buffers import BufferRing, HostMemory, Mark
from deepspeed.zero.offload.host import HostPlacement, stretched
from deepspeed.zero.offload.swap_file import SwapFile, SwapFolder, SwapQueue, mapped_zeros
from deepspeed.zero.offload.swap_slots import SwappedGroup, SwappedUnit, SwapPlace, SwapSlots
from deepspeed.zero.placement import GRADIENT, MASTER, Keep, exact_norm

if TYPE_CHECKING:
    from deepspeed.zero.unit import ParamShard, SubGroup, Unit

#: sums in flight to slots and disk, and staging buffers for them: one is filled while another is written
MAX_STAGED = 2
_KEY = "zero_optimization.offload_optimizer.nvme_path"


class _StagedSum(NamedTuple):
    """`_StagedSum` is a sum in a staging buffer, or in flight to it."""

    done: Mark
    source: Tensor  # held until `done`, so that its memory does not go back to the allocator
    place: int  # of the buffer in its ring
    staged: Tensor
    unit: SwappedUnit
    adds: bool


class NvmePlacement(HostPlacement):
    """`NvmePlacement` keeps master weights, states and reduced gradients in a swap file.

    Args:
        accelerator: the accelerator that holds the weights.
        nvme_path: a folder on a local disk; created if it is missing.
        rank: rank of this process, for the name of its folder there.
        aio: how files are read and written.
        pins: whether staging buffers and slots are page-locked.
        reads_ahead: read the next sub-group while one is updated.
        writes_behind: write a sub-group that leaves memory while the next one is updated.
        buffer_count: tensors of sub-groups in memory, if more than `reads_ahead` and `writes_behind` need.

    Raises:
        ConfigError: if `nvme_path` cannot be used.
        OpUnavailable: if no extension provides `async_io`.
    """

    fetches = True

    def __init__(
        self,
        accelerator: DeepSpeedAccelerator,
        nvme_path: str | os.PathLike[str],
        *,
        rank: int,
        aio: AioConfig,
        pins: bool,
        reads_ahead: bool,
        writes_behind: bool,
        buffer_count: int = 0,
    ) -> None:
        super().__init__(accelerator, pins=pins)
        self._plain = HostMemory(accelerator, pins=False)
        self._incoming = BufferRing(self._memory, MAX_STAGED)
        self._queue = SwapQueue(aio)  # for gradients, and single tensors
        self._folder = SwapFolder(nvme_path, rank=rank, key=_KEY)
        self._file = SwapFile(self._folder.path / "optimizer.swap")
        self._slots = SwapSlots(self._memory, aio, reads_ahead=reads_ahead, writes_behind=writes_behind)
        self._buffer_count = buffer_count
        self._num_states = 0
        self._units: list[SwappedUnit] = []  # in the order of the stage's units
        self._by_index: dict[int, SwappedUnit] = {}  # by unit index; units passed to `home_of_gradients`
        self._places: dict[int, SwapPlace] = {}  # by the id of a shard
        self._optimizer: Optimizer | None = None
        self._updated: Sequence[Sequence[ParamShard]] = ()  # by batch
        self._arriving: deque[_StagedSum] = deque()
        self._fetched: int | None = None  # the batch between `fetch` and `store`

    # ---- memory -------------------------------------------------------------------------------------------------

    def prepare(
        self, optimizer: Optimizer, numel: int, gradient_dtype: torch.dtype, *, max_sub_group_numel: int
    ) -> None:
        self._num_states = num_states(optimizer)
        self._slots.provide(self._buffer_count // (2 + self._num_states), max_sub_group_numel)
        num_bytes = numel * (4 + 4 * self._num_states + gradient_dtype.itemsize)
        report = preflight(self._folder.path, num_bytes)  # for this rank: others may have allocated already
        for remark in report.remarks:
            warn_once(f"{_KEY}: {remark}")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, *, crosses: bool) -> Tensor:
        return self._plain.aligned(numel * dtype.itemsize).view(dtype)  # until `put_away`

    def put_away(self, optimizer: Optimizer, sub_groups: Sequence[SubGroup], gradient_dtype: torch.dtype) -> None:
        unit = SwappedUnit([], gradient_dtype)
        self._units.append(unit)
        for sub_group in sub_groups:
            first = sub_group.shards[0].master
            group = SwappedGroup(
                sub_group,
                self._file,
                master_dtype=first.dtype,
                gradient_dtype=gradient_dtype,
                num_states=self._num_states,
            )
            unit.groups.append(group)
            self._slots.expect(group)
            self._queue.write(group.tensors[MASTER].region, stretched(first, sub_group.numel)).wait()
            for shard, start in sub_group.starts():
                self._places[id(shard)] = SwapPlace(unit, group, start)
                _empty(shard.master)
                self.put_away_state(shard, optimizer.state.get(shard.master, {}))

    def put_away_state(self, shard: ParamShard, state: dict[str, Any]) -> None:
        for name, value in _by_element(shard, state):
            self._write(shard, name, value)
            _empty(value)

    def home_of_gradients(self, unit: Unit, own_S: Tensor) -> Tensor:
        swapped = self._by_index[unit.index] = self._units[len(self._by_index)]
        swapped.own = own_S if own_S.numel() > 0 else None
        return own_S.new_empty(0)

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self._slots.num_bytes

    def release(self) -> None:
        """Drop all swapped data with its file; errors of operations in flight are ignored."""
        self._slots.release()
        self.forget()
        self.finish_sending()
        self._outgoing.release()
        self._incoming = BufferRing(self._memory, MAX_STAGED)
        self._units, self._by_index, self._places = [], {}, {}
        self._optimizer, self._updated = None, ()
        self._folder.remove()

    # ---- single tensors -----------------------------------------------------------------------------------------

    def read(self, shard: ParamShard, name: str, value: Any) -> Any:
        if not self._is_away(shard, name, value):
            return value
        _, group, start = self._places[id(shard)]
        if (held := self._slots.found(group, name)) is not None:
            return held.narrow(0, start, shard.fragment.numel).clone().view(shard.shape)
        region, dtype = group.tensors[name]
        found = self._plain.aligned(shard.fragment.numel * dtype.itemsize, start * dtype.itemsize).view(dtype)
        self._queue.read(region, found, start * dtype.itemsize).wait()
        return found.view(shard.shape)

    def write(self, shard: ParamShard, name: str, value: Tensor | None, new: Tensor) -> None:
        if not self._is_away(shard, name, value):
            super().write(shard, name, value, new)
            return
        place = self._places[id(shard)]
        if name == GRADIENT and not place.unit.has_sum:
            self._zero_gradients(place.unit)
        self._write(shard, name, new.to(place.group.tensors[name].dtype))

    def _is_away(self, shard: ParamShard, name: str, value: Any) -> bool:
        """Return whether a tensor of `shard` has no memory now; a gradient is then None."""
        if name == GRADIENT:
            return value is None
        is_empty = isinstance(value, Tensor) and value.numel() == 0
        return is_empty and name in self._places[id(shard)].group.tensors

    def _write(self, shard: ParamShard, name: str, new: Tensor) -> None:
        _, group, start = self._places[id(shard)]
        values = new.detach().reshape(-1).to("cpu").contiguous()
        before = group.tensors.get(name)
        tensor = group.tensor(name, new.dtype)
        if tensor is not before:
            self._slots.drop(group, name)
        if not self._slots.put(group, name, values, start):
            self._queue.write(tensor.region, values, start * new.dtype.itemsize).wait()

    def _zero_gradients(self, unit: SwappedUnit) -> None:
        for group in unit.groups:
            zeros = torch.zeros(group.numel, dtype=unit.gradient_dtype)
            if not self._slots.put(group, GRADIENT, zeros):
                self._queue.write(group.tensors[GRADIENT].region, zeros).wait()
        unit.has_sum = True

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":  # for units that are not offloaded
            return super().scratch(numel, dtype, device)
        return mapped_zeros(self._folder.path, numel, dtype)

    # ---- gradients arrive ---------------------------------------------------------------------------------------

    def keeper(self, *, adds: bool) -> Keep | None:
        return partial(self._receive_sum, adds)

    def _receive_sum(self, adds: bool, index: int, work: Work, source: Tensor) -> Mark:
        while len(self._arriving) >= MAX_STAGED:
            self._land(self._arriving.popleft())
        with self._lane.copying():
            work.wait()
            staged = self._incoming.take(source.numel(), source.dtype)
            staged.copy_(source, non_blocking=True)
        done = self._lane.mark()
        self._arriving.append(_StagedSum(done, source, self._incoming.place, staged, self._by_index[index], adds))
        while self._arriving and self._arriving[0].done.poll():
            self._land(self._arriving.popleft())
        return done

    def _land(self, arrival: _StagedSum) -> None:
        """Add a sum to the step's earlier sum, and put it into its sub-groups' slots or start to write it."""
        arrival.done.wait_on_host()
        unit, sum_S = arrival.unit, arrival.staged
        if arrival.adds and unit.has_sum:
            sum_S = self._gradients(unit, sum_S.numel()).add_(sum_S)
        sum_S = sum_S.to(unit.gradient_dtype)
        unit.finish_writing()
        for group, part in unit.parts(sum_S):
            if not self._slots.put(group, GRADIENT, part):
                unit.written = self._queue.write(group.tensors[GRADIENT].region, part)
        if unit.written is not None:
            self._incoming.hold(arrival.place, unit.written)
        unit.has_sum, unit.norms = True, [exact_norm(sum_S)]

    def _gradients(self, unit: SwappedUnit, numel: int) -> Tensor:
        """Return this step's sum so far, [S]; padding is zero."""
        unit.finish_writing()
        found_S = torch.zeros(numel, dtype=unit.gradient_dtype)
        works = []
        for group, part in unit.parts(found_S):
            if (held := self._slots.found(group, GRADIENT)) is not None:
                part.copy_(held)
            else:
                works.append(self._queue.read(group.tensors[GRADIENT].region, part))
        for work in works:
            work.wait()
        return found_S

    def settle(self) -> None:
        while self._arriving:
            self._land(self._arriving.popleft())
        for unit in self._units:
            unit.finish_writing()
        self._slots.settle()  # writes of the last update: an error is raised before the next update begins
        if self._units:
            self._file.check("update", 0, self._file.num_bytes)

    def norms(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        return [norm for unit in self._units if unit.has_sum for norm in unit.norms]

    def gradients_changed(self) -> None:
        for unit in self._units:
            if not unit.has_sum:
                continue
            unit.norms = []
            for group in unit.groups:
                found = self._slots.found(group, GRADIENT)
                if found is None:
                    found = torch.empty(group.numel, dtype=unit.gradient_dtype)
                    self._queue.read(group.tensors[GRADIENT].region, found).wait()
                unit.norms.append(exact_norm(found))
                if unit.own is not None:  # else the next backward would restore the former sums
                    unit.own.narrow(0, group.sub_group.start, group.numel).copy_(found)

    def forget(self) -> None:
        """Drop the gradients, including those in flight and errors of writing them."""
        if self._fetched is not None:  # its update failed
            self._give_back(self._fetched)
        for arrival in self._arriving:
            arrival.done.wait_on_host()
        self._arriving.clear()
        self._queue.finish()
        self._incoming.forget()
        self._slots.forget_gradients()
        for unit in self._units:
            unit.has_sum, unit.norms, unit.written = False, [], None

    # ---- around the update --------------------------------------------------------------------------------------

    def plan(self, optimizer: Optimizer, updated: Sequence[Sequence[ParamShard]]) -> None:
        self._optimizer, self._updated = optimizer, updated
        self._slots.begin([self._group(number) for number, shards in enumerate(updated) if shards])

    def fetch(self, number: int) -> None:
        slot = self._slots.fetch(self._group(number))
        self._fetched = number
        for shard, start in self._updated_of(number):
            for name, value in self._swapped(shard):
                value.data = slot.view(name).narrow(0, start, shard.fragment.numel).view(shard.shape)
            shard.grad = slot.view(GRADIENT).narrow(0, start, shard.fragment.numel).view(shard.shape)

    def store(self, number: int) -> None:
        self._give_back(number)
        self._slots.make_room()

    def _give_back(self, number: int) -> None:
        """Release the memory of the batch; the optimizer's results are in the slot."""
        group = self._group(number)
        slot = self._slots.of(group)
        assert slot is not None
        names = {MASTER}
        for shard, start in self._updated_of(number):
            for name, value in ((MASTER, shard.master), *_by_element(shard, self._state(shard))):
                group.tensor(name, value.dtype)
                kept = slot.view(name).narrow(0, start, shard.fragment.numel)
                if kept.data_ptr() != value.data_ptr():  # a new state, or one that the optimizer replaced
                    kept.copy_(value.detach().reshape(-1))
                names.add(name)
                _empty(value)
            shard.grad = None
        slot.give_back(names, self._sent)
        self._fetched = None

    def _group(self, number: int) -> SwappedGroup:
        return self._places[id(self._updated[number][0])].group

    def _updated_of(self, number: int) -> Iterator[tuple[ParamShard, int]]:
        return ((shard, self._places[id(shard)].start) for shard in self._updated[number])

    def _state(self, shard: ParamShard) -> Mapping[str, Any]:
        assert self._optimizer is not None
        return self._optimizer.state.get(shard.master, {})

    def _swapped(self, shard: ParamShard) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `shard` that have no memory."""
        tensors = ((MASTER, shard.master), *self._state(shard).items())
        return ((name, value) for name, value in tensors if self._is_away(shard, name, value))


def _by_element(shard: ParamShard, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the states that have memory and one number per element."""
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == shard.shape:
            yield name, value


def _empty(tensor: Tensor) -> None:
    """Free the memory of a tensor; the object stays."""
    tensor.data = torch.empty(0, dtype=tensor.dtype)
