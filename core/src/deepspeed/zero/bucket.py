"""`Bucket` moves the gradients of one unit from autograd to the shards of the ranks.

A `Bucket` is written, launched when it is full or when the backward ends, and finished before its values are read
(`gradient_reduction.py`). Written gradients are copied to the buffer in batches: they wait until many elements wait,
the bucket is full or the backward ends.

    EMPTY --write--> FILLING --launch--> REDUCING --finish--> REDUCED --write--> FILLING
      |                                     ^                    |
      +------------- launch ----------------+------ launch ------+         any --clear | abandon--> EMPTY

Its buffer has N elements. With a `pool` (stages 2 and 3) the bucket borrows the buffer from the first gradient until
the sum was taken out. Without a pool (stages 0 and 1) the buffer lives from step to step, and the sum stays in it.

[Note: a second reduction in a step] A late gradient, or two backwards before the step, reduce the same bucket again. A
sum that stays in the buffer is part of that reduction, so only one rank may contribute it; the others contribute new
gradients only. Each rank keeps the range `kept` of the buffer and zeroes the rest before it writes again. In stage 0
the first rank keeps everything; in stage 1 each rank keeps its shard.

[Note: late gradients] A gradient may arrive after the launch of its bucket in the same backward, for example if two
checkpoints run the same block. It arrives in a hook, where this rank must not wait: the peer whose part of the sum
is missing may be in a collective of the model that needs this rank. So the gradient waits until the reduction is over.

`GradientShards` (`gradient_memory.py`) keeps the sums of stages 2 and 3.

Legend: N numel of the unit, S of a shard.
"""

import enum
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed.comm.backend import Work
from deepspeed.zero.layout import UnitLayout
from deepspeed.zero.placement import Keep


class BucketState(enum.Enum):
    EMPTY = enum.auto()  # holds nothing of this step
    FILLING = enum.auto()  # holds gradients of this rank
    REDUCING = enum.auto()  # the collective is in flight
    REDUCED = enum.auto()  # holds the sum of this step


_FILLING = BucketState.FILLING

#: the legal moves; `Bucket._move` is the only writer of the state
LEGAL_MOVES = {
    (BucketState.EMPTY, BucketState.FILLING),
    (BucketState.EMPTY, BucketState.REDUCING),
    (BucketState.FILLING, BucketState.REDUCING),
    (BucketState.REDUCED, BucketState.FILLING),
    (BucketState.REDUCED, BucketState.REDUCING),
    (BucketState.REDUCING, BucketState.REDUCED),
    *((state, BucketState.EMPTY) for state in BucketState),
}


class Bucket:
    """`Bucket` holds the gradient memory of one unit.

    Args:
        index: index of the unit.
        layout: layout of the unit.
        shapes: shapes of the unit's gradients.
        memory: allocates the buffer [N] if there is no pool; called at the first write.
        pool: lends the buffer.
        result: [start, stop) of the buffer that holds this rank's sum after a reduction.
        kept: [start, stop) that this rank contributes to a second reduction; see the note.
        wire_dtype: dtype of the reduction; None means the buffer's dtype.
        keep: takes the sum out of the buffer; None: the sum stays there.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        *,
        shapes: Sequence[Sequence[int]],
        memory: Callable[[], Tensor] | None = None,
        pool: "BucketPool | None" = None,
        result: tuple[int, int],
        kept: tuple[int, int],
        wire_dtype: torch.dtype | None,
        keep: Keep | None = None,
    ) -> None:
        assert (memory is None) != (pool is None)
        self.index = index
        self.layout = layout
        self._numels, self._shapes = layout.numels, shapes
        self.state = BucketState.EMPTY
        self.is_late = False  # a gradient arrived after the launch, in the same backward
        self._held: set[int] = set()  # parameters with values in the buffer: a write adds instead of overwriting
        self._arrived: set[int] = set()  # parameters whose gradient of this backward is in the buffer
        self._num_awaited = len(layout.numels)  # all other parameters
        self.was_launched = False  # in this backward; the reduction may be over already
        self._waiting: dict[int, Tensor] = {}  # gradients that are not in the buffer yet, by parameter
        self._waiting_numel = 0
        self._late: list[dict[int, Tensor]] = []  # gradients that wait for the reduction in flight
        self._factor = 1.0  # multiplies the gradients
        self._allocate, self._pool = memory, pool
        self._result = slice(*result)
        self.kept = kept  # may change from one backward to the next
        self._wire_dtype = wire_dtype
        self._keep = keep
        self._memory: Tensor | None = None
        self._views: list[Tensor] = []
        self._busy: Work | None = None  # work to wait for before the buffer is written again
        self._wire: Tensor | None = None
        self._work: Work | None = None

    def begin_backward(self, factor: float = 1.0) -> None:
        """Forget which gradients have arrived; accumulated gradients stay.

        Args:
            factor: multiplies the gradients of this backward; includes the division by the number of ranks.
        """
        self.finish()
        self.was_launched = False
        self._factor = factor
        self._arrived = set()
        self._num_awaited = len(self._numels)

    @property
    def num_missing(self) -> int:
        """Number of gradients that have not arrived yet in this backward."""
        return len(self._numels) - len(self._arrived | self._waiting.keys())

    def write(self, grads: dict[int, Tensor]) -> None:
        """Add gradients of the unit's parameters, by their places, to what the buffer holds of each. The bucket owns
        the dict afterwards."""
        if self.state is not _FILLING:
            if not self.poll():  # [Note: late gradients]
                self.is_late = True
                self._late.append(grads)
                return
            self._begin_to_fill()
        if not self._waiting.keys().isdisjoint(grads):
            self.flush()
        if self._waiting:
            self._waiting.update(grads)
        else:
            self._waiting = grads
        if len(self._waiting) < self._num_awaited:
            self._waiting_numel += sum(map(self._numels.__getitem__, grads))
            if self._waiting_numel < FLUSH_NUMEL:
                return
        self.flush()

    def _begin_to_fill(self) -> None:
        if self.was_launched:
            self.finish()
            self.is_late = True
        if self.state is not _FILLING:  # `finish` may have written late gradients
            self._open()
            self._move(_FILLING)

    def flush(self) -> None:
        """Add the waiting gradients to the buffer."""
        waiting, views = self._waiting, self._views
        new = waiting
        if self._held:
            held = [param for param in waiting if param in self._held]
            new = {param: grad for param, grad in waiting.items() if param not in self._held}
            if held:
                _add([views[param] for param in held], [waiting[param] for param in held], self._factor)
        if new:
            _set([views[param] for param in new], list(new.values()), self._factor)
        self._held.update(waiting)
        self._arrived.update(waiting)
        self._num_awaited = len(self._numels) - len(self._arrived)
        self._drop_waiting()

    def launch(self, reduce: Callable[[Tensor], Work]) -> None:
        """Start the reduction. Parameters without a gradient contribute zero."""
        self.flush()
        if self.state is not BucketState.FILLING:
            self._open()
        memory = self._memory
        assert memory is not None
        if len(self._held) < len(self._views):
            for param in set(range(len(self._views))) - self._held:
                self._views[param].zero_()
        for start, stop in self.layout.gaps:
            memory[start:stop].zero_()
        self._wire = memory if self._wire_dtype in (None, memory.dtype) else memory.to(self._wire_dtype)
        self._move(BucketState.REDUCING)
        self.was_launched = True
        self._work = reduce(self._wire)

    def poll(self) -> bool:
        """Return whether `finish` would not block."""
        return self._work is None or self._work.poll()

    def finish(self) -> None:
        """Wait for the reduction, if one is in flight, and store the sum."""
        if self.state is not BucketState.REDUCING:
            return
        assert self._work is not None
        assert self._wire is not None
        assert self._memory is not None
        if self._pool is None and self._wire is not self._memory:
            self._work.wait()
            self._memory[self._result].copy_(self._wire[self._result])
            self._wire = self._memory
        if self._keep is None:
            self._work.wait()
        else:
            self._busy = self._keep(self.index, self._work, self._wire[self._result])
        self._work = self._wire = None
        self._move(BucketState.REDUCED)
        self._close()
        if self._late:
            self._write_late()

    def _write_late(self) -> None:
        late, self._late = self._late, []
        for grads in late:
            self.write(grads)
        self.flush()

    def forget(self, param: int) -> None:
        """Drop the gradient of one parameter."""
        self._held.discard(param)

    def clear(self) -> None:
        """Forget all gradients; called after the step."""
        self.finish()
        self._forget()

    def abandon(self) -> Work | None:
        """Forget all gradients and the reduction in flight, without waiting; return its work for the backend."""
        work, self._work, self._wire = self._work, None, None
        self._forget()
        return work

    def release(self) -> None:
        """Drop the buffer immediately."""
        self.clear()
        self._memory = self._busy = None
        self._views = []

    def _forget(self) -> None:
        self.was_launched = False
        self.is_late = False
        self._late = []
        self._drop_waiting()
        self._move(BucketState.EMPTY)
        self._close()

    def _drop_waiting(self) -> None:
        self._waiting = {}
        self._waiting_numel = 0

    def _open(self) -> None:
        """Make the buffer ready to be written."""
        if self._busy is not None:
            self._busy.wait()
            self._busy = None
        if self._memory is None:
            self._take_memory()
        elif self.state is BucketState.REDUCED:  # [Note: a second reduction in a step]
            self._memory[: self.kept[0]].zero_()
            self._memory[self.kept[1] :].zero_()
            self._held = set(range(len(self._views)))

    def _take_memory(self) -> None:
        allocate = self._allocate
        self._memory = allocate() if allocate is not None else self._borrowed()
        self._views = [
            self._memory.narrow(0, offset, numel).view(shape)
            for offset, numel, shape in zip(self.layout.offsets, self.layout.numels, self._shapes, strict=True)
        ]

    def _borrowed(self) -> Tensor:
        assert self._pool is not None
        return self._pool.take(self.layout.padded_numel)

    @property
    def is_lasting(self) -> bool:
        """Whether the buffer lives from step to step."""
        return self._pool is None

    def lasting(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the buffer that lives from step to step, [N], and its views, one per parameter in the parameter's
        shape, through which gradients are written."""
        assert self.is_lasting
        if self._memory is None:
            self._take_memory()
        assert self._memory is not None
        return self._memory, self._views

    def _close(self) -> None:
        """Forget this rank's own gradients; return a borrowed buffer to the pool."""
        self._held = set()
        if self._pool is not None and self._memory is not None:
            self._pool.give(self._memory, self._busy)
            self._memory = self._busy = None
            self._views = []

    def _move(self, to: BucketState) -> None:
        assert (self.state, to) in LEGAL_MOVES, (self.state, to)
        self.state = to


def _set(views: list[Tensor], grads: list[Tensor], factor: float) -> None:
    """Compute view = factor * grad for each pair."""
    if factor == 1.0:
        torch._foreach_copy_(views, grads)
        return
    if _is_one_call(views[0].device, factor):
        torch._foreach_copy_(views, grads)
        torch._foreach_mul_(views, factor)
        return
    for view, grad in zip(views, grads, strict=True):
        if view.dtype == grad.dtype:
            torch.mul(grad, factor, out=view)
        else:
            view.copy_(grad).mul_(factor)


def _add(views: list[Tensor], grads: list[Tensor], factor: float) -> None:
    """Compute view += factor * grad for each pair."""
    if factor == 1.0 or _is_one_call(views[0].device, factor):
        torch._foreach_add_(views, grads, alpha=factor)
        return
    for view, grad in zip(views, grads, strict=True):
        view.add_(grad, alpha=factor)


def _is_one_call(device: torch.device, factor: float) -> bool:
    """Return whether to multiply many tensors with one operator. It may round the factor to their dtype, which
    is exact for a power of two. On the CPU one pass per tensor is faster."""
    return device.type != "cpu" and math.frexp(factor)[0] == 0.5


class BucketPool:
    """`BucketPool` lends buffers to buckets of stages 2 and 3; it keeps at most `max_free` buffers for reuse."""

    def __init__(self, max_free: int, allocate: Callable[[int], Tensor]) -> None:
        self._max_free = max_free
        self._allocate = allocate
        self._free: list[tuple[Tensor, Work | None]] = []  # with the work to wait for before a buffer is written
        self._lent: dict[int, Tensor] = {}  # by address: the whole buffer; a bucket may use only its beginning

    def take(self, numel: int) -> Tensor:
        """Return a 1-D buffer of `numel` elements with arbitrary contents."""
        fitting = [index for index, (buffer, _) in enumerate(self._free) if buffer.numel() >= numel]
        buffer, busy = self._free.pop(fitting[0]) if fitting else (self._allocate(numel), None)
        if busy is not None:
            busy.wait()
        self._lent[buffer.data_ptr()] = buffer
        return buffer[:numel]

    def give(self, memory: Tensor, busy: Work | None = None) -> None:
        """Take back a buffer that is in use until `busy` is done."""
        buffer = self._lent.pop(memory.data_ptr())
        if len(self._free) < self._max_free:
            self._free.append((buffer, busy))
        elif busy is not None:
            busy.wait()  # before the allocator gets the memory back

    def drop_free(self) -> None:
        """Free the buffers that wait for reuse."""
        for _, busy in self._free:
            if busy is not None:
                busy.wait()
        self._free = []

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that wait for reuse."""
        return sum(buffer.nbytes for buffer, _ in self._free)


#: waiting gradient elements at which they are copied to the buffer: many small gradients, or one large one that is
#: still in the CPU's cache
FLUSH_NUMEL = 2**18
