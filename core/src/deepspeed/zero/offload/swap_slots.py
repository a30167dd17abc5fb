"""`SwapSlots`: the few sub-groups of a swapped optimizer that have memory, and what moves between it and the file.

`NvmePlacement` knows a unit whose optimizer side is swapped out as `SwappedUnit`, and each of its sub-groups as
`SwappedGroup`.

A slot has the tensors of one sub-group at a time: master weights, states, gradients. What the update changes stays
there, and is written only when the slot is needed for another sub-group; whoever asks for values meanwhile finds them
there. So an update begins with the sub-groups that the one before ended with (`update.py` turns the order around),
and only the others pass the disk.

    FREE --read--> READING --finish--> HELD --lend--> LENT --give_back--> HELD --write--> WRITING --finish--> HELD
      |                                 |                                                      any --clear--> FREE
      +---------- read ----<------------+   (what is missing: gradients that went to the file)
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
    """Master weights, gradients or one state of a sub-group, end to end."""

    region: Region
    dtype: torch.dtype


class SwappedGroup:
    """A sub-group and its region: master weights, states, gradients, in that order, so that one operation moves all.

    Args:
        master_dtype, gradient_dtype: of its master weights and reduced gradients.
        num_states: for which the region has places, of the dtype of the master weights; they get their names later.
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
        """The tensor `name`; made if the group has none of that dtype."""
        found = self.tensors.get(name)
        if found is None or found.dtype != dtype:
            found = self.tensors[name] = SwappedTensor(self._place(self.numel * dtype.itemsize), dtype)
        return found

    def _place(self, num_bytes: int) -> Region:
        """Return a region for a tensor: within the group's, or apart from it where that has no place."""
        for spare in self._spares:
            if num_bytes <= spare.num_bytes:
                self._spares.remove(spare)
                return spare.part(0, num_bytes)
        return self.region.file.allocate(num_bytes)

    def runs(self, names: Iterable[str]) -> list[Region]:
        """The regions of these tensors, as few as possible: those in the group's that follow each other are one."""
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
    """The sub-groups of a unit, and what is known of its reduced gradients."""

    groups: list[SwappedGroup]
    gradient_dtype: torch.dtype
    own: Tensor | None = None  # the sums beside the weights, to which a later backward adds (stage 1)
    has_sum: bool = False  # of this step
    norms: list[Tensor] = field(default_factory=list)  # 0-D, of the sum
    written: SwapWork | None = None  # the last write of the sum

    def finish_writing(self) -> None:
        """Return when the sum is in the file; raises OSError if it is not."""
        if self.written is not None:
            self.written.wait()
            self.written = None

    def parts(self, buffer_S: Tensor) -> Iterator[tuple[SwappedGroup, Tensor]]:
        """Each sub-group with its elements of a buffer over this rank's shard."""
        for group in self.groups:
            yield group, buffer_S.narrow(0, group.sub_group.start, group.numel)


class SwapPlace(NamedTuple):
    """A place says in which sub-group of which unit a shard is, and where it begins there."""

    unit: SwappedUnit
    group: SwappedGroup
    start: int  # in elements from the beginning of the sub-group


#: sub-groups that are being read while one is updated
MAX_READS_AHEAD = 2


class SlotState(enum.Enum):
    FREE = enum.auto()  # holds nothing
    READING = enum.auto()  # tensors of its sub-group are on their way from the file
    HELD = enum.auto()  # its tensors have their values; those that are not `dirty` have them in the file too
    LENT = enum.auto()  # the optimizer's tensors are views of it
    WRITING = enum.auto()  # as HELD; those that are dirty are on their way to the file


#: the moves that are legal; `SwapSlot._move` is the only writer of the state
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
    """Memory for one sub-group at a time, laid out as its region of the file. It stays allocated."""

    def __init__(self, memory: HostMemory, queue: SwapQueue) -> None:
        self._memory = memory
        self._queue = queue  # moves what is in the slot, and nothing else
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._apart: dict[int, Tensor] = {}  # bytes of tensors that are not in the sub-group's region, by offset
        self._works: list[SwapWork] = []
        self._sent: Mark | None = None  # copies of the weights to the device
        self.state = SlotState.FREE
        self.group: SwappedGroup | None = None
        self.names: set[str] = set()  # of the tensors that have their values
        self.dirty: set[str] = set()  # of those among them that the file has other values of
        self._moving: set[str] = set()  # of those that are being read or written

    def view(self, name: str) -> Tensor:
        """[numel of the sub-group], the memory of its tensor `name`."""
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
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never both
            self._buffer = self._memory.aligned(whole.num_bytes)
        start = region.offset - whole.offset
        return self._buffer[start : start + region.num_bytes]

    def read(self, group: SwappedGroup) -> None:
        """Begin to read what is missing of the tensors of `group`; what the slot has of another is dropped."""
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
        """The tensors of the sub-group have their values, and may be changed until `give_back`."""
        self._move(SlotState.LENT)

    def give_back(self, changed: Iterable[str], sent: Mark | None = None) -> None:
        """These tensors have other values now, and the gradients are not needed any more.

        Args:
            sent: after copies out of the slot.
        """
        self._move(SlotState.HELD)
        self.names.update(changed)
        self.dirty.update(changed)
        self.drop(GRADIENT)
        self._sent = sent

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Give elements from `start` on of the tensor `name` other values."""
        if name in self._moving or self._sent is not None:
            self.finish()
        self.view(name).narrow(0, start, values.numel()).copy_(values)
        self.names.add(name)
        self.dirty.add(name)

    def drop(self, name: str) -> None:
        """The values of a tensor are not needed, or are in the file."""
        self.names.discard(name)
        self.dirty.discard(name)

    def write(self) -> None:
        """Begin to write the tensors that the file has other values of."""
        if not self.dirty:
            return
        assert self.group is not None
        self._move(SlotState.WRITING)
        for region in self.group.runs(self.dirty):
            self._works.append(self._queue.write(region, self._bytes(region)))
        self._moving = set(self.dirty)

    def finish(self) -> None:
        """Return when nothing that is in flight uses the memory.

        Raises:
            OSError: what was in flight failed. What was to be written is in the slot still, and is written again when
                the slot is needed.
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
        """Write what the file does not have, and forget the sub-group."""
        self.finish()
        self.write()
        self.finish()
        self._forget()

    def abandon(self) -> None:
        """Forget the sub-group and what was not written, whether or not what is in flight fails."""
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
    """The slots of a rank.

    Args:
        memory: gives the buffers.
        aio: how the file is read and written.
        reads_ahead: read the next sub-group while one is updated.
        writes_behind: write a sub-group that leaves while the next one is updated.
    """

    def __init__(self, memory: HostMemory, aio: AioConfig, *, reads_ahead: bool, writes_behind: bool) -> None:
        self._memory, self._aio = memory, aio
        self._reads_ahead, self._writes_behind = reads_ahead, writes_behind
        self._min_count = self.count = 1 + reads_ahead + writes_behind
        self._max_numel = self._largest_numel = 0  # of all slots together, of a sub-group
        self._slots: list[SwapSlot] = []  # at most `count`; that was used last at the end
        self._order: Sequence[SwappedGroup] = ()  # of the update
        self._due: dict[SwappedGroup, int] = {}  # those to come: place in the order

    def provide(self, count: int, sub_group_numel: int) -> None:
        """Memory for `count` sub-groups of so many elements; more of them if they are smaller. Pipelines have what they
        need in any case."""
        self._max_numel = max(count, self._min_count) * sub_group_numel

    def expect(self, group: SwappedGroup) -> None:
        """A sub-group that will be fetched."""
        self._largest_numel = max(self._largest_numel, group.numel)
        self.count = max(self._min_count, self._max_numel // self._largest_numel)

    def begin(self, order: Sequence[SwappedGroup]) -> None:
        """An update of these sub-groups begins. For each follow `fetch`, its slot's `give_back`, and `make_room`."""
        self._order = order
        self._due = {group: place for place, group in enumerate(order)}

    def of(self, group: SwappedGroup) -> SwapSlot | None:
        """The slot that has the sub-group's values."""
        return next((slot for slot in self._slots if slot.group is group), None)

    def fetch(self, group: SwappedGroup) -> SwapSlot:
        """The slot with all tensors of the sub-group, lent; reads of those to come have begun."""
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
        """A slot was given back. Begin to write those that were used first, if others to come need their slots."""
        num_missing = len(self._due) - sum(slot.group in self._due for slot in self._slots)
        num_needed = num_missing - (self.count - len(self._slots)) - len(self._spare())
        dirty = [slot for slot in self._slots if slot.state is SlotState.HELD and slot.dirty]
        for slot in [slot for slot in dirty if slot.group not in self._due][: max(num_needed, 0)]:
            slot.write()
            if not self._writes_behind:
                slot.finish()

    def _read_ahead(self, place: int) -> None:
        """Read the next sub-groups of which something is missing, as far as there are slots for them."""
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
        """Return the slots that the update needs no more and that have nothing to be written, or are being written."""
        spare = [slot for slot in self._slots if slot.state is not SlotState.LENT and slot.group not in self._due]
        return [slot for slot in spare if slot.state is SlotState.WRITING or not slot.dirty]

    def _free(self) -> SwapSlot | None:
        """A slot for a sub-group to come. One of those that are being written is left to that."""
        if len(self._slots) < self.count:
            return self._made()
        spare = self._spare()
        writing = [slot for slot in spare if slot.state is SlotState.WRITING]
        rest = [slot for slot in spare if slot.state is not SlotState.WRITING]
        return next(iter(rest or writing[:-1]), None)

    def _taken(self) -> SwapSlot:
        """A slot for a sub-group that has none: that of the one which is needed last, or not any more."""
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
        """[numel of the sub-group], the values of its tensor `name`; None: the file has them."""
        slot = self.of(group)
        return None if slot is None or name not in slot.names else slot.view(name)

    def put(self, group: SwappedGroup, name: str, values: Tensor, start: int = 0) -> bool:
        """Give elements from `start` on of the tensor `name` other values; False: the file has it."""
        slot = self.of(group)
        if slot is None or (name not in slot.names and values.numel() < group.numel):
            return False
        slot.put(name, start, values)
        return True

    def drop(self, group: SwappedGroup, name: str) -> None:
        """The sub-group gets another tensor `name`."""
        slot = self.of(group)
        if slot is not None:
            slot.finish()
            slot.drop(name)

    def settle(self) -> None:
        """Return when nothing is in flight.

        Raises:
            OSError: a write has failed.
        """
        for slot in self._slots:
            slot.finish()

    def forget_gradients(self) -> None:
        """The gradients of the step are not needed any more."""
        for slot in self._slots:
            slot.drop(GRADIENT)

    def release(self) -> None:
        """Drop the memory, and errors of what is in flight."""
        for slot in self._slots:
            slot.abandon()
        self._slots, self._order, self._due = [], (), {}

    @property
    def num_bytes(self) -> int:
        """The number of bytes that all buffers have."""
        return sum(slot.num_bytes for slot in self._slots)
