"""A bucket of gradients on its way from autograd to the rank that owns it.

A `Bucket` is written by the gradient hooks (`strategy.py`), launched when it is full or when the backward ends, and
finished before its values are read. A `Slot` is the place of one fragment in it.

    FILLING --launch--> REDUCING --finish | abandon--> FILLING

After a reduction only the *holder* of a bucket (its owner; rank 0 in stage 0) goes on adding to what is there; for
all others the next write overwrites. So a second backward before the step adds up correctly: the holder
contributes the sum so far plus its own new gradient, the others their new gradient only.
"""

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed.comm.backend import Work
from deepspeed.zero.layout import BucketSpec, Fragment
from deepspeed.zero.placement import Keep


class BucketState(enum.Enum):
    FILLING = enum.auto()
    REDUCING = enum.auto()


class Slot:
    """One fragment's place in a bucket."""

    __slots__ = ("arrived", "bucket", "fragment", "holds", "view")

    def __init__(self, bucket: "Bucket", fragment: Fragment) -> None:
        self.bucket = bucket
        self.fragment = fragment
        self.view: Tensor | None = None  # 1-D, grad dtype; None while the bucket has no memory
        self.holds = False  # a write adds instead of overwriting
        self.arrived = False  # in the present backward


class Bucket:
    """Gradient memory for one `BucketSpec`.

    Args:
        spec: which elements of which group, and who owns them.
        is_holder: whether this rank keeps the sum after a reduction (see the module docstring).
        take: gives the bucket's memory (1-D, spec.numel); called when it is first written.
        give: takes the memory back after a reduction, or None if it stays.
        wire_dtype: dtype of the exchange; None means the memory's own.
        keep: takes the sum away from the memory, if it is kept elsewhere (`placement.py`); it waits for the exchange.
    """

    def __init__(
        self,
        spec: BucketSpec,
        *,
        is_holder: bool,
        take: Callable[[BucketSpec], Tensor],
        give: Callable[[Tensor, Work | None], None] | None,
        wire_dtype: torch.dtype | None,
        keep: Keep | None = None,
    ) -> None:
        self.spec = spec
        self.state = BucketState.FILLING
        self.slots = [Slot(self, fragment) for fragment in spec.fragments]
        self.num_missing = len(self.slots)
        self.is_late = False  # a gradient arrived after the launch, in the same backward
        self._was_launched = False  # in the present backward; its reduction may be over already
        self._is_holder = is_holder
        self._take, self._give = take, give
        self._wire_dtype = wire_dtype
        self._keep = keep
        self._busy: Work | None = None  # what to wait for before the memory is written again
        self._memory: Tensor | None = None
        self._wire: Tensor | None = None
        self._work: Work | None = None

    def begin_backward(self) -> None:
        """Forget which gradients have arrived; what was accumulated stays."""
        self.finish()
        self._was_launched = False
        self.num_missing = len(self.slots)
        for slot in self.slots:
            slot.arrived = False

    def write(self, slot: Slot, grad: Tensor, factor: float) -> None:
        """slot = factor * grad, or slot += factor * grad if it holds a value. `grad` has the parameter's shape."""
        if self._was_launched:
            self.finish()
            self.is_late = True
        self._open()
        view = slot.view
        assert view is not None
        flat = grad.reshape(-1)
        if flat.numel() != slot.fragment.numel:
            start = slot.fragment.param_start
            flat = flat[start : start + slot.fragment.numel]
        if slot.holds:
            view.add_(flat, alpha=factor)
        elif view.dtype == flat.dtype:
            torch.mul(flat, factor, out=view)
        else:
            view.copy_(flat).mul_(factor)
        slot.holds = True
        if not slot.arrived:
            slot.arrived = True
            self.num_missing -= 1

    def launch(self, exchange: Callable[[Tensor], Work]) -> None:
        """Start the reduction. Fragments without a gradient contribute zero."""
        assert self.state is BucketState.FILLING, self.state
        memory = self._open()
        for slot in self.slots:
            if not slot.holds:
                assert slot.view is not None
                slot.view.zero_()
        wire = memory if self._wire_dtype in (None, memory.dtype) else memory.to(self._wire_dtype)
        self._wire = wire
        self._work = exchange(wire)
        self._was_launched = True
        self.state = BucketState.REDUCING

    def finish(self) -> None:
        """Wait for the reduction, if one is under way."""
        if self.state is BucketState.FILLING:
            return
        assert self._work is not None
        assert self._memory is not None
        assert self._wire is not None
        summed = self._wire
        if summed is not self._memory and self._give is None:
            self._work.wait()
            summed = self._memory.copy_(summed)
        if self._keep is None:
            self._work.wait()
        else:
            self._busy = self._keep(self.spec, self._work, summed)
        self._work = self._wire = None
        self.state = BucketState.FILLING
        for slot in self.slots:
            slot.holds = self._is_holder
        if self._give is not None:
            self._close()

    def clear(self) -> None:
        """Forget all gradients; called after the step."""
        self.finish()
        self._forget()

    def abandon(self) -> Work | None:
        """Forget all gradients and the reduction under way, without waiting; returns its work, for the backend."""
        work, self._work, self._wire = self._work, None, None
        self.state = BucketState.FILLING
        self._forget()
        return work

    def _forget(self) -> None:
        self.is_late = False
        for slot in self.slots:
            slot.holds = False
        if self._give is not None and self._memory is not None:
            self._close()

    def release(self) -> None:
        """Drop the memory at once; a bucket and its slots are a reference cycle."""
        self.clear()
        self._memory = self._busy = None
        for slot in self.slots:
            slot.view = None

    def _open(self) -> Tensor:
        """The memory, ready to be written."""
        if self._busy is not None:
            self._busy.wait()
            self._busy = None
        if self._memory is None:
            self._memory = self._take(self.spec)
            for slot in self.slots:
                slot.view = self._memory.narrow(0, slot.fragment.start - self.spec.start, slot.fragment.numel)
        return self._memory

    def _close(self) -> None:
        assert self._give is not None
        assert self._memory is not None
        self._give(self._memory, self._busy)
        self._memory = self._busy = None
        for slot in self.slots:
            slot.view = None


class BucketPool:
    """Memory for buckets that are sent and forgotten (stage 2): at most `max_free` buffers wait for reuse."""

    def __init__(self, max_free: int, allocate: Callable[[int], Tensor]) -> None:
        self._max_free = max_free
        self._allocate = allocate
        self._free: list[tuple[Tensor, Work | None]] = []  # with what to wait for before it is written
        self._lent: dict[int, Tensor] = {}  # by address: the whole buffer of which a bucket uses the beginning

    def take(self, spec: BucketSpec) -> Tensor:
        """A 1-D buffer of spec.numel elements, with arbitrary contents."""
        fitting = [index for index, (buffer, _) in enumerate(self._free) if buffer.numel() >= spec.numel]
        buffer, busy = self._free.pop(fitting[0]) if fitting else (self._allocate(spec.numel), None)
        if busy is not None:
            busy.wait()
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: spec.numel]

    def give(self, memory: Tensor, busy: Work | None = None) -> None:
        """Take a buffer back that is in use until `busy` is done."""
        buffer = self._lent.pop(memory.data_ptr())
        if len(self._free) < self._max_free:
            self._free.append((buffer, busy))
        elif busy is not None:
            busy.wait()  # its memory goes back to the allocator

    @property
    def free_bytes(self) -> int:
        """Bytes that wait for reuse."""
        return sum(buffer.nbytes for buffer, _ in self._free)
