"""`SwapSlots`: the few sub-groups of a swapped optimizer that have memory, and what moves between it and the file.

A slot has a buffer for each tensor of one sub-group at a time: master weights, states, gradients. After the update it
is written, and keeps what it has until another sub-group needs it: whoever asks for its values meanwhile finds them
there. So an update begins with the sub-groups that the one before ended with (`update.py` turns the order around),
reads only the others, and its last writes run beside the next forward.

    FREE --read--> READING --finish--> HELD --lend--> LENT --write--> WRITING --finish--> HELD
      |                                 |                                                  any --clear--> FREE
      +---------- read ----<------------+   (what is missing: gradients that went to the file)
"""

import enum
from collections.abc import Iterable, Sequence

from torch import Tensor

from deepspeed.config.data import AioConfig
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.lane import Mark
from deepspeed.zero.offload.swap_file import SwapQueue, SwapWork
from deepspeed.zero.offload.swapped import SwappedGroup
from deepspeed.zero.placement import GRADIENT

#: sub-groups that are being read while one is updated
MAX_READS_AHEAD = 2


class SlotState(enum.Enum):
    FREE = enum.auto()  # holds nothing
    READING = enum.auto()  # tensors of its sub-group are on their way from the file
    HELD = enum.auto()  # its tensors have their values; but for gradients, the file has the same
    LENT = enum.auto()  # the optimizer's tensors are views of it
    WRITING = enum.auto()  # as HELD, but the file gets them at the moment


#: the moves that are legal; `SwapSlot._move` is the only writer of the state
LEGAL_MOVES = {
    (SlotState.FREE, SlotState.READING),
    (SlotState.HELD, SlotState.READING),
    (SlotState.READING, SlotState.HELD),
    (SlotState.HELD, SlotState.LENT),
    (SlotState.LENT, SlotState.WRITING),
    (SlotState.HELD, SlotState.WRITING),  # gradients, before another sub-group takes the slot
    (SlotState.WRITING, SlotState.HELD),
    *((state, SlotState.FREE) for state in SlotState),
}


class SwapSlot:
    """Memory for one sub-group at a time: a buffer for each of its tensors, which stay allocated."""

    def __init__(self, memory: HostMemory, queue: SwapQueue) -> None:
        self._memory = memory
        self._queue = queue  # moves what is in the slot, and nothing else
        self._buffers: dict[str, Tensor] = {}  # bytes
        self._works: list[SwapWork] = []
        self._sent: Mark | None = None  # copies of the weights to the device
        self.state = SlotState.FREE
        self.group: SwappedGroup | None = None
        self.names: set[str] = set()  # of the tensors that have their values
        self._awaited: set[str] = set()  # of those that are being read

    def view(self, name: str) -> Tensor:
        """[numel of the sub-group], the buffer of its tensor `name`."""
        assert self.group is not None
        dtype = self.group.tensors[name].dtype
        num_bytes = self.group.numel * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[name] = self._memory.aligned(num_bytes)
        return buffer[:num_bytes].view(dtype)

    def read(self, group: SwappedGroup) -> None:
        """Begin to read what is missing of the tensors of `group`; what the slot has of another is dropped."""
        self.finish()
        if self.group is not group:
            self._forget()
        missing = group.tensors.keys() - self.names
        if not missing:
            return
        self._move(SlotState.READING)
        self.group = group
        for name in sorted(missing):
            self._works.append(self._queue.read(group.tensors[name].region, self.view(name)))
        self._awaited = missing

    def lend(self) -> None:
        """The tensors of the sub-group have their values, and may be changed until `write`."""
        self._move(SlotState.LENT)

    def write(self, names: Iterable[str], sent: Mark | None = None) -> None:
        """Begin to write these tensors.

        Args:
            sent: after copies out of the slot.
        """
        assert self.group is not None
        self._move(SlotState.WRITING)
        self._sent = sent
        for name in sorted(names):
            self._works.append(self._queue.write(self.group.tensors[name].region, self.view(name)))

    def finish(self) -> None:
        """Return when nothing that is in flight uses the buffers.

        Raises:
            OSError: what was in flight failed; of a write every later call raises it again, as the file has old values.
        """
        try:
            for work in self._works:
                work.wait()
        except OSError:
            if self.state is SlotState.READING:
                self.abandon()
            raise
        self._works = []
        if self._sent is not None:
            self._sent.wait_on_host()
            self._sent = None
        if self.state is SlotState.READING:
            self.names |= self._awaited
            self._awaited = set()
        if self.state in (SlotState.READING, SlotState.WRITING):
            self._move(SlotState.HELD)

    def clear(self) -> None:
        """Forget the sub-group, when nothing uses the buffers any more."""
        self.finish()
        self._forget()

    def abandon(self) -> None:
        """As `clear`, whether or not what is in flight fails."""
        self._queue.finish()
        self._works = []
        if self._sent is not None:
            self._sent.wait_on_host()
        self._forget()

    def _forget(self) -> None:
        self._move(SlotState.FREE)
        self.group, self._sent = None, None
        self.names, self._awaited = set(), set()

    def _move(self, to: SlotState) -> None:
        assert (self.state, to) in LEGAL_MOVES, (self.state, to)
        self.state = to

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class SwapSlots:
    """The slots of a rank.

    Args:
        memory: gives the buffers.
        aio: how the file is read and written.
        reads_ahead: read the next sub-group while one is updated.
        writes_behind: write a sub-group while the next one is updated.
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
        """An update of these sub-groups begins; `fetch` and `store` follow for each."""
        self._order = order
        self._due = {group: place for place, group in enumerate(order)}

    def of(self, group: SwappedGroup) -> SwapSlot | None:
        """The slot that has the sub-group's values."""
        return next((slot for slot in self._slots if slot.group is group), None)

    def fetch(self, group: SwappedGroup) -> SwapSlot:
        """The slot with all tensors of the sub-group, lent until `store`; reads of those to come have begun."""
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

    def store(self, group: SwappedGroup, names: Iterable[str], sent: Mark | None) -> None:
        """Begin to write these tensors of a sub-group that was fetched."""
        slot = self.of(group)
        assert slot is not None
        slot.names.discard(GRADIENT)
        slot.names.update(names)
        slot.write(names, sent)
        if not self._writes_behind:
            slot.finish()

    def _read_ahead(self, place: int) -> None:
        """Read the next sub-groups of which something is missing, as far as there are slots for them."""
        num_reads = 0
        for group in self._order[place : place + self.count]:
            slot = self.of(group)
            if slot is not None and group.tensors.keys() <= slot.names:
                continue
            if (slot := slot or self._spare()) is None:
                return
            if slot.state is not SlotState.READING:
                slot.read(group)
            num_reads += 1
            if num_reads == MAX_READS_AHEAD:
                return

    def _spare(self) -> SwapSlot | None:
        """A slot that the update does not need any more. One of those that are being written is left to that."""
        if len(self._slots) < self.count:
            return self._made()
        spare = [slot for slot in self._slots if slot.state is not SlotState.LENT and slot.group not in self._due]
        writing = [slot for slot in spare if slot.state is SlotState.WRITING]
        rest = [slot for slot in spare if slot.state is not SlotState.WRITING]
        return next(iter(rest or writing[:-1]), None)

    def _taken(self) -> SwapSlot:
        """A slot for a sub-group that has none: that of the one which is needed last, or not any more."""
        if len(self._slots) < self.count:
            return self._made()
        free = [slot for slot in self._slots if slot.state is not SlotState.LENT]
        slot = max(free, key=lambda slot: len(self._order) if slot.group is None else self._place(slot.group))
        if slot.group in self._due and GRADIENT in slot.names:  # which only the slot has
            slot.finish()
            slot.write([GRADIENT])
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

    def take_gradients(self, group: SwappedGroup, sum_S: Tensor) -> bool:
        """Keep the gradients of a sub-group; False: it has no slot."""
        slot = self.of(group)
        if slot is None:
            return False
        slot.view(GRADIENT).copy_(sum_S)
        slot.names.add(GRADIENT)
        return True

    def drop(self, group: SwappedGroup, name: str) -> None:
        """The file gets other values of the tensor `name`."""
        slot = self.of(group)
        if slot is not None:
            slot.finish()
            slot.names.discard(name)

    def settle(self) -> None:
        """Return when everything is in the file.

        Raises:
            OSError: it is not.
        """
        for slot in self._slots:
            slot.finish()

    def forget_gradients(self) -> None:
        """The gradients of the step are not needed any more."""
        for slot in self._slots:
            slot.names.discard(GRADIENT)

    def release(self) -> None:
        """Drop the memory, and errors of what is in flight."""
        for slot in self._slots:
            slot.abandon()
        self._slots, self._order, self._due = [], (), {}

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(slot.num_bytes for slot in self._slots)
