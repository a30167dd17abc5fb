"""Host memory for copies to and from the device (page-locked on request, also as a ring of buffers), and `CopyLane`, a
separate queue for these copies beside the computation.

`HostPlacement` and `HostShards` use it. A synchronized device has no queue: a copy is done when its call returns, and
marks have nothing to wait for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.errors import first_line
from deepspeed.log import warn_once

#: bytes; direct reads and writes of files need addresses that are multiples of it
ALIGNMENT = 4096


class Waitable(Protocol):
    """`Waitable` is a copy or an operation on a file."""

    def wait_on_host(self) -> None:
        """Return when the operation is done."""


class HostMemory:
    """`HostMemory` allocates host tensors.

    Args:
        pins: whether to page-lock memory for copies from or to the device, so that copies run without the CPU.
        key: configuration section, for warnings.
    """

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool, key: str = "offload_optimizer") -> None:
        self._accelerator = accelerator
        self._pins = pins
        self._key = key

    def allocate(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        """Return an uninitialized 1-D tensor; `crosses`: whether the device copies from or to it."""
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
        return self.pinned(tensor) if crosses else tensor

    def aligned(self, num_bytes: int, offset: int = 0) -> Tensor:
        """Return [num_bytes] uninitialized uint8 for file reads and writes, with page alignment.

        Args:
            offset: where in the file it is read or written. No copy is needed if the address and the offset have the
                same remainder modulo the page size.
        """
        memory = self.pinned(torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu"))
        start = (offset - memory.data_ptr()) % ALIGNMENT
        return memory[start : start + num_bytes]

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return `tensor` (contents arbitrary), or one like it in page-locked memory if that is enabled."""
        if not self._pins or tensor.numel() == 0:
            return tensor
        try:
            return self._accelerator.pin_memory(tensor)
        except RuntimeError as error:  # no such memory, or the system's limit is reached: slower, not wrong
            self._pins = False
            warn_once(
                f"zero_optimization.{self._key}.pin_memory: the accelerator gave no page-locked memory "
                f"({first_line(error)}); copies go through pageable memory, which is slower. Raise the limit "
                "on locked memory (ulimit -l), or set pin_memory to false"
            )
            return tensor


class BufferRing:
    """`BufferRing` lends `count` staging buffers in turn, each only after the copy that used it last is done.

    The buffers are page-aligned.
    """

    def __init__(self, memory: HostMemory, count: int) -> None:
        self._memory = memory
        self._buffers: list[Tensor | None] = [None] * count  # bytes
        self._busy: list[Waitable | None] = [None] * count
        self.place = 0  # of the buffer that was lent last

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return `numel` elements with arbitrary contents."""
        self.place = place = (self.place + 1) % len(self._buffers)
        self._finish(place)
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers[place]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[place] = self._memory.aligned(num_bytes)
        return buffer[:num_bytes].view(dtype)

    def hold(self, place: int, until: Waitable) -> None:
        """Mark the buffer at `place` as in use until `until` is done."""
        self._busy[place] = until

    def forget(self) -> None:
        """Mark all buffers as free: the operations that used them are done, and their errors do not matter."""
        self._busy = [None] * len(self._busy)

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def release(self) -> None:
        """Drop the buffers after the copies that use them are done."""
        for place in range(len(self._busy)):
            self._finish(place)
        self._buffers = [None] * len(self._buffers)

    def _finish(self, place: int) -> None:
        """Return when the buffer is free. An error of its last user is raised once; the buffer is free then too."""
        busy = self._busy[place]
        if busy is None:
            return
        try:
            busy.wait_on_host()
        except OSError:
            self._busy[place] = None
            raise
        self._busy[place] = None


class Mark:
    """`Mark` is a place in the lane's queue."""

    __slots__ = ("_accelerator", "_event", "_orders")

    def __init__(self, accelerator: DeepSpeedAccelerator, event: Any, orders: bool) -> None:
        self._accelerator = accelerator
        self._event = event
        self._orders = orders

    def wait(self) -> None:
        """Order work that is queued on the current stream from now on after the mark. The CPU does not wait."""
        if self._orders:
            self._accelerator.current_stream().wait_event(self._event)

    def poll(self) -> bool:
        """Return whether everything before the mark is done."""
        return self._event is None or bool(self._event.query())

    def wait_on_host(self) -> None:
        """Return when everything before the mark is done."""
        if self._event is not None:
            self._event.synchronize()


class CopyLane:
    """`CopyLane` is one stream for copies.

    Args:
        accelerator: the accelerator whose memory is copied from and to. If it `resolves_data_dependency`, the device
            itself orders uses of a tensor, and only the CPU waits for marks.
    """

    def __init__(self, accelerator: DeepSpeedAccelerator) -> None:
        self._accelerator = accelerator
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._orders = self._stream is not None and not accelerator.resolves_data_dependency()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queue work inside the context on the lane, after all work that was queued on the current stream so far."""
        if self._stream is None:
            yield
            return
        if self._orders:
            self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Return a mark after all work that was queued on the lane so far."""
        if self._stream is None:
            return Mark(self._accelerator, None, False)
        event = self._accelerator.Event()
        event.record(self._stream)
        return Mark(self._accelerator, event, self._orders)
