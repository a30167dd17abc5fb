"""`SwapSlots` holds in memory the few sub-groups of a swapped optimizer that fit, and moves data from and to the file.

`NvmePlacement` represents a unit with swapped-out optimizer data as `SwappedUnit`, and each of its sub-groups as
`SwappedGroup`.

A slot holds the tensors of one sub-group at a time: master weights, states, gradients. Values that the update changes
stay in the slot and are written only when another sub-group needs the slot; until then, reads get them from the slot.
So an update begins with the sub-groups with which the previous one ended (`update.py` reverses the order), and only the
other sub-groups are read and written.

    FREE --read--> READING --finish--> HELD --lend--> LENT --give_back--> HELD --write--> WRITING --finish--> HELD
      |                                 |                                                      any --clear--> FREE
      +---------- read ----<------------+   (missing tensors: gradients that went to the file)
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.config.training import AioConfig
from deepspeed.zero.offload.buffers import HostMemory, Mark
from deepspeed.zero.offload.swap_file import Region, SwapFile, SwapQueue, SwapWork, padded
from deepspeed.zero.placement import GRADIENT, MASTER
from deepspeed.zero.unit import SubGroup


class SwappedTensor(NamedTuple):
    """`SwappedTensor` is the master weights, gradients or one state of a sub-group, end to end."""

    region: Region
    dtype: torch.dtype


class SwappedGroup:
    """`SwappedGroup` is a sub-group and its region: master weights, states, gradients, so that one operation moves all.

    Args:
        master_dtype, gradient_dtype: dtypes of its master weights and reduced gradients.
        num_states: number of states with room in the region, in the dtype of the master weights; named later.
    """

    def __init__(
        self,
        sub_group: SubGroup,
        file: SwapFile,
        *,
        master_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        num_states: int,
    ) -> None:
        self.sub_group = sub_group
        self.numel = sub_group.numel
        sizes = [self.numel * dtype.itemsize for dtype in (*[master_dtype] * (1 + num_states), gradient_dtype)]
        starts = list(accumulate(map(padded, sizes), initial=0))
        self.region = file.allocate(starts[-1])
        master, *self._spares, gradient = map(self.region.part, starts, sizes)
        self.tensors = {MASTER: SwappedTensor(master, master_dtype), GRADIENT: SwappedTensor(gradient, gradient_dtype)}

    def tensor(self, name: str, dtype: torch.dtype) -> SwappedTensor:
        """Return the tensor `name`; create it if the group has none of that dtype."""
        found = self.tensors.get(name)
        if found is None or found.dtype != dtype:
            found = self.tensors[name] = SwappedTensor(self._place(self.numel * dtype.itemsize), dtype)
        return found

    def _place(self, num_bytes: int) -> Region:
        """Return a region for a tensor: in the group's region, or a separate one if there is no room."""
        for spare in self._spares:
            if num_bytes <= spare.num_bytes:
                self._spares.remove(spare)
                return spare.part(0, num_bytes)
        return self.region.file.allocate(num_bytes)

    def runs(self, names: Iterable[str]) -> list[Region]:
        """Return the regions of these tensors; adjacent ones within the group's region are merged."""
        runs: list[Region] = []
        for region in sorted((self.tensors[name].region for name in names), key=lambda region: region.offset):
            last = runs[-1] if runs else None
            if last is not None and last.offset + padded(last.num_bytes) == region.offset < self.region.stop:
                runs[-1] = Region(region.file, last.offset, region.stop - last.offset)
            else:
                runs.append(region)
        return runs


@dataclass(slots=True)
class SwappedUnit:
    """`SwappedUnit` holds the sub-groups of a unit and facts about its reduced gradients."""

    groups: list[SwappedGroup]
    gradient_dtype: torch.dtype
    own: Tensor | None = None  # the sums on the device, to which a later backward adds (stage 1)
    has_sum: bool = False  # of this step
    norms: list[Tensor] = field(default_factory=list)  # 0-D, of the sum
    written: SwapWork | None = None  # the last write of the sum

    def finish_writing(self) -> None:
        """Return when the sum is in the file; raise OSError if the write failed."""
        if self.written is not None:
            self.written.wait()
            self.written = None

    def parts(self, buffer_S: Tensor) -> Iterator[tuple[SwappedGroup, Tensor]]:
        """Yield each sub-group with its elements of a buffer over this rank's shard."""
        for group in self.groups:
            yield group, buffer_S.narrow(0, group.sub_group.start, group.numel)


class SwapPlace(NamedTuple):
    """`SwapPlace` is the place of a shard: its unit, its sub-group, and the offset there."""

    unit: SwappedUnit
    group: SwappedGroup
    start: int  # in elements from the beginning of the sub-group


#: sub-groups that are read while one is updated
MAX_READS_AHEAD = 2


class SlotState(enum.Enum):
    FREE = enum.auto()  # holds nothing
    READING = enum.auto()  # tensors of its sub-group are being read from the file
    HELD = enum.auto()  # its tensors have their values; the file has the values of those that are not `dirty`
    LENT = enum.auto()  # the optimizer's tensors are views of it
    WRITING = enum.auto()  # like HELD, while dirty tensors are being written to the file


#: the legal moves; `SwapSlot._move` is the only writer of the state
LEGAL_MOVES = {
    (SlotState.FREE, SlotState.READING),
    (SlotState.HELD, SlotState.READING),
    (SlotState.READING, SlotState.HELD),
    (SlotState.HELD, SlotState.LENT),
    (SlotState.LENT, SlotState.HELD),
    (SlotState.HELD, SlotState.WRITING),
    (SlotState.WRITING, SlotState.HELD),
    *((state, SlotState.FREE) for state in SlotState),
}


class SwapSlot:
    """`SwapSlot` is memory for one sub-group at a time, laid out like its region of the file. It stays allocated."""

    def __init__(self, memory: HostMemory, queue: SwapQueue) -> None:
        self._memory = memory
        self._queue = queue  # used for this slot only
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._apart: dict[int, Tensor] = {}  # by offset: bytes of tensors outside of the sub-group's region
        self._works: list[SwapWork] = []
        self._sent: Mark | None = None  # copies of the weights to the device
        self.state = SlotState.FREE
        self.group: SwappedGroup | None = None
        self.names: set[str] = set()  # tensors whose values are in the slot
        self.dirty: set[str] = set()  # those of `names` whose values differ from the file
        self._moving: set[str] = set()  # those that are being read or written

    def view(self, name: str) -> Tensor:
        """Return the memory of the sub-group's tensor `name`, [numel of the sub-group]."""
        assert self.group is not None
        region, dtype = self.group.tensors[name]
        return self._bytes(region).view(dtype)

    def _bytes(self, region: Region) -> Tensor:
        assert self.group is not None
        whole = self.group.region
        if not whole.offset <= region.offset < whole.stop:
            if region.offset not in self._apart:
                self._apart[region.offset] = self._memory.aligned(region.num_bytes)
            return self._apart[region.offset]
        if self._buffer.numel() < whole.num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # so that both buffers never exist at once
            self._buffer = self._memory.aligned(whole.num_bytes)
        start = region.offset - whole.offset
        return self._buffer[start : start + region.num_bytes]

    def read(self, group: SwappedGroup) -> None:
        """Start to read the missing tensors of `group`; drop tensors of another sub-group."""
        self.finish()
        if self.group is not group:
            assert not self.dirty, self.dirty
            self._forget()
        missing = group.tensors.keys() - self.names
        if not missing:
            return
        self._move(SlotState.READING)
        self.group = group
        for region in group.runs(missing):
            self._works.append(self._queue.read(region, self._bytes(region)))
        self._moving = missing

    def lend(self) -> None:
        """Lend the sub-group's tensors, which may be changed until `give_back`."""
        self._move(SlotState.LENT)

    def give_back(self, changed: Iterable[str], sent: Mark | None = None) -> None:
        """End the lending: these tensors have new values, and the gradients are not needed any more.

        Args:
            sent: a mark after copies out of the slot.
        """
        self._move(SlotState.HELD)
        self.names.update(changed)
        self.dirty.update(changed)
        self.drop(GRADIENT)
        self._sent = sent

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on of the tensor `name`."""
        if name in self._moving or self._sent is not None:
            self.finish()
        self.view(name).narrow(0, start, values.numel()).copy_(values)
        self.names.add(name)
        self.dirty.add(name)

    def drop(self, name: str) -> None:
        """Drop the values of a tensor, which are not needed or are in the file."""
        self.names.discard(name)
        self.dirty.discard(name)

    def write(self) -> None:
        """Start to write the tensors whose values differ from the file."""
        if not self.dirty:
            return
        assert self.group is not None
        self._move(SlotState.WRITING)
        for region in self.group.runs(self.dirty):
            self._works.append(self._queue.write(region, self._bytes(region)))
        self._moving = set(self.dirty)

    def finish(self) -> None:
        """Return when no operation in flight uses the memory.

        Raises:
            OSError: if an operation failed. Values that could not be written stay in the slot, and are written again
                when the slot is needed.
        """
        try:
            for work in self._works:
                work.wait()
        except OSError:
            if self.state is SlotState.READING:
                self.abandon()
            elif self.state is SlotState.WRITING:
                self._works, self._moving = [], set()
                self._move(SlotState.HELD)
            raise
        self._works = []
        if self._sent is not None:
            self._sent.wait_on_host()
            self._sent = None
        if self.state is SlotState.READING:
            self.names |= self._moving
        elif self.state is SlotState.WRITING:
            self.dirty -= self._moving
        else:
            return
        self._moving = set()
        self._move(SlotState.HELD)

    def clear(self) -> None:
        """Write the values that differ from the file, and forget the sub-group."""
        self.finish()
        self.write()
        self.finish()
        self._forget()

    def abandon(self) -> None:
        """Forget the sub-group and unwritten values; ignore failures of operations in flight."""
        self._queue.finish()
        self._works = []
        if self._sent is not None:
            self._sent.wait_on_host()
        self._forget()

    def _forget(self) -> None:
        self._move(SlotState.FREE)
        self.group, self._sent, self._apart = None, None, {}
        self.names, self.dirty, self._moving = set(), set(), set()

    def _move(self, to: SlotState) -> None:
        assert (self.state, to) in LEGAL_MOVES, (self.state, to)
        self.state = to

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes + sum(buffer.nbytes for buffer in self._apart.values())


class SwapSlots:
    """`SwapSlots` manages the slots of a rank.

    Args:
        memory: allocates the buffers.
        aio: how the file is read and written.
        reads_ahead: read the next sub-group while one is updated.
        writes_behind: write a sub-group that leaves memory while the next one is updated.
    """

    def __init__(self, memory: HostMemory, aio: AioConfig, *, reads_ahead: bool, writes_behind: bool) -> None:
        self._memory, self._aio = memory, aio
        self._reads_ahead, self._writes_behind = reads_ahead, writes_behind
        self._min_count = self.count = 1 + reads_ahead + writes_behind
        self._max_numel = self._largest_numel = 0  # of all slots together, of the largest sub-group
        self._slots: list[SwapSlot] = []  # at most `count`; the one used last is at the end
        self._order: Sequence[SwappedGroup] = ()  # of the update
        self._due: dict[SwappedGroup, int] = {}  # sub-groups still to be updated: place in the order

    def provide(self, count: int, sub_group_numel: int) -> None:
        """Provide memory for `count` sub-groups of this size, or for more if they are smaller. Pipelines always get
        the slots that they need."""
        self._max_numel = max(count, self._min_count) * sub_group_numel

    def expect(self, group: SwappedGroup) -> None:
        """Register a sub-group that will be fetched."""
        self._largest_numel = max(self._largest_numel, group.numel)
        self.count = max(self._min_count, self._max_numel // self._largest_numel)

    def begin(self, order: Sequence[SwappedGroup]) -> None:
        """Begin an update of these sub-groups. For each, call `fetch`, its slot's `give_back`, and `make_room`."""
        self._order = order
        self._due = {group: place for place, group in enumerate(order)}

    def of(self, group: SwappedGroup) -> SwapSlot | None:
        """Return the slot with the sub-group's values, or None."""
        return next((slot for slot in self._slots if slot.group is group), None)

    def fetch(self, group: SwappedGroup) -> SwapSlot:
        """Return the lent slot with all tensors of the sub-group; start to read the next sub-groups."""
        slot = self.of(group) or self._taken()
        slot.read(group)
        slot.finish()
        slot.lend()
        self._slots.remove(slot)
        self._slots.append(slot)
        place = self._due.pop(group)
        if self._reads_ahead:
            self._read_ahead(place + 1)
        return slot

    def make_room(self) -> None:
        """After a slot was given back, start to write the earliest used slots if coming sub-groups need them."""
        num_missing = len(self._due) - sum(slot.group in self._due for slot in self._slots)
        num_needed = num_missing - (self.count - len(self._slots)) - len(self._spare())
        dirty = [slot for slot in self._slots if slot.state is SlotState.HELD and slot.dirty]
        for slot in [slot for slot in dirty if slot.group not in self._due][: max(num_needed, 0)]:
            slot.write()
            if not self._writes_behind:
                slot.finish()

    def _read_ahead(self, place: int) -> None:
        """Read missing tensors of the next sub-groups, as far as there are slots for them."""
        num_reads = 0
        for group in self._order[place : place + self.count]:
            slot = self.of(group)
            if slot is not None and group.tensors.keys() <= slot.names:
                continue
            if (slot := slot or self._free()) is None:
                return
            if slot.state is not SlotState.READING:
                slot.read(group)
            num_reads += 1
            if num_reads == MAX_READS_AHEAD:
                return

    def _spare(self) -> list[SwapSlot]:
        """Return the slots that the update does not need any more and that are clean or being written."""
        spare = [slot for slot in self._slots if slot.state is not SlotState.LENT and slot.group not in self._due]
        return [slot for slot in spare if slot.state is SlotState.WRITING or not slot.dirty]

    def _free(self) -> SwapSlot | None:
        """Return a slot for a coming sub-group, or None. One slot that is being written is left alone."""
        if len(self._slots) < self.count:
            return self._made()
        spare = self._spare()
        writing = [slot for slot in spare if slot.state is SlotState.WRITING]
        rest = [slot for slot in spare if slot.state is not SlotState.WRITING]
        return next(iter(rest or writing[:-1]), None)

    def _taken(self) -> SwapSlot:
        """Return a slot for a sub-group without one, taken from a sub-group that is not needed or needed last."""
        if len(self._slots) < self.count:
            return self._made()
        free = self._spare() or [slot for slot in self._slots if slot.state is not SlotState.LENT]
        slot = max(free, key=lambda slot: len(self._order) if slot.group is None else self._place(slot.group))
        slot.clear()
        return slot

    def _place(self, group: SwappedGroup) -> int:
        return self._due.get(group, len(self._order))

    def _made(self) -> SwapSlot:
        slot = SwapSlot(self._memory, SwapQueue(self._aio))
        self._slots.insert(0, slot)
        return slot

    # ---- outside of an update -----------------------------------------------------------------------------------

    def found(self, group: SwappedGroup, name: str) -> Tensor | None:
        """Return the values of the sub-group's tensor `name`, [numel of the sub-group]; None: they are in the file."""
        slot = self.of(group)
        return None if slot is None or name not in slot.names else slot.view(name)

    def put(self, group: SwappedGroup, name: str, values: Tensor, start: int = 0) -> bool:
        """Replace elements from `start` on of the tensor `name`; False: its values are in the file."""
        slot = self.of(group)
        if slot is None or (name not in slot.names and values.numel() < group.numel):
            return False
        slot.put(name, start, values)
        return True

    def drop(self, group: SwappedGroup, name: str) -> None:
        """Drop the sub-group's tensor `name`, because another one replaces it."""
        slot = self.of(group)
        if slot is not None:
            slot.finish()
            slot.drop(name)

    def settle(self) -> None:
        """Return when nothing is in flight.

        Raises:
            OSError: if a write failed.
        """
        for slot in self._slots:
            slot.finish()

    def forget_gradients(self) -> None:
        """Drop the gradients of the step, which are not needed any more."""
        for slot in self._slots:
            slot.drop(GRADIENT)

    def release(self) -> None:
        """Drop the memory, and ignore errors of operations in flight."""
        for slot in self._slots:
            slot.abandon()
        self._slots, self._order, self._due = [], (), {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all buffers."""
        return sum(slot.num_bytes for slot in self._slots)
