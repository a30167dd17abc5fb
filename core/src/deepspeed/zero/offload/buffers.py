"""Host memory that the device copies from and to (page-locked on request, and a ring of buffers of it), and the lane of
these copies: a queue of their own beside the computation.

Used by `HostPlacement` and `HostShards`. On a synchronized device there is no queue: a copy is done when its call
returns, and marks have nothing to wait for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.errors import first_line
from deepspeed.log import warn_once

#: bytes; direct reads and writes of files want addresses that are multiples of it
ALIGNMENT = 4096


class Waitable(Protocol):
    """A copy, or an operation on a file."""

    def wait_on_host(self) -> None:
        """Return when it is done."""


class HostMemory:
    """Gives host tensors.

    Args:
        pins: whether memory that is copied from or to the device is page-locked, so that copies need no host.
        key: the section of the configuration that asks for it.
    """

    def __init__(self, accelerator: DeepSpeedAccelerator, *, pins: bool, key: str = "offload_optimizer") -> None:
        self._accelerator = accelerator
        self._pins = pins
        self._key = key

    def allocate(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        """An uninitialized 1-D tensor; `crosses`: the device copies from or to it."""
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
        return self.pinned(tensor) if crosses else tensor

    def aligned(self, num_bytes: int, offset: int = 0) -> Tensor:
        """[num_bytes] uint8, uninitialized, for what files are read into and written from: begins at a page.

        Args:
            offset: in the file, where it is read or written; it is moved without a copy if both are apart from a page
                by as many bytes.
        """
        memory = self.pinned(torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu"))
        start = (offset - memory.data_ptr()) % ALIGNMENT
        return memory[start : start + num_bytes]

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose contents do not matter yet, in page-locked memory if that is asked for."""
        if not self._pins or tensor.numel() == 0:
            return tensor
        try:
            return self._accelerator.pin_memory(tensor)
        except RuntimeError as error:  # no such memory here, or the system grants no more of it: slower, not wrong
            self._pins = False
            warn_once(
                f"zero_optimization.{self._key}.pin_memory: the accelerator gave no page-locked memory "
                f"({first_line(error)}); copies go through pageable memory, which is slower. Raise the limit "
                "on locked memory (ulimit -l), or set pin_memory to false"
            )
            return tensor


class BufferRing:
    """`count` staging buffers taken in turn; one is taken again only when the copy that used it last is done.

    They begin at a page.
    """

    def __init__(self, memory: HostMemory, count: int) -> None:
        self._memory = memory
        self._buffers: list[Tensor | None] = [None] * count  # bytes
        self._busy: list[Waitable | None] = [None] * count
        self.place = 0  # of the buffer that was taken last

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of arbitrary contents."""
        self.place = place = (self.place + 1) % len(self._buffers)
        self._finish(place)
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers[place]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[place] = self._memory.aligned(num_bytes)
        return buffer[:num_bytes].view(dtype)

    def hold(self, place: int, until: Waitable) -> None:
        """The buffer at `place` is in use until then."""
        self._busy[place] = until

    def forget(self) -> None:
        """All that used the buffers is done, and errors of it do not matter."""
        self._busy = [None] * len(self._busy)

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def release(self) -> None:
        """Drop the buffers, once the copies that use them are done."""
        for place in range(len(self._busy)):
            self._finish(place)
        self._buffers = [None] * len(self._buffers)

    def _finish(self, place: int) -> None:
        """Return when the buffer is free. An error of what used it is raised once: the buffer is free then too."""
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
    """A place in the lane's queue."""

    __slots__ = ("_accelerator", "_event", "_orders")

    def __init__(self, accelerator: DeepSpeedAccelerator, event: Any, orders: bool) -> None:
        self._accelerator = accelerator
        self._event = event
        self._orders = orders

    def wait(self) -> None:
        """Let what is queued on the current stream from now on come after the mark. The host does not wait."""
        if self._orders:
            self._accelerator.current_stream().wait_event(self._event)

    def poll(self) -> bool:
        """Whether everything before the mark is done."""
        return self._event is None or bool(self._event.query())

    def wait_on_host(self) -> None:
        """Return when everything before the mark is done."""
        if self._event is not None:
            self._event.synchronize()


class CopyLane:
    """One stream for copies.

    Args:
        accelerator: the one whose memory is copied from and to. Where it `resolves_data_dependency` the device itself
            orders uses of a tensor, and only the host waits for marks.
    """

    def __init__(self, accelerator: DeepSpeedAccelerator) -> None:
        self._accelerator = accelerator
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._orders = self._stream is not None and not accelerator.resolves_data_dependency()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, work is queued on the lane, after all that the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        if self._orders:
            self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """A mark after all that the lane has been given so far."""
        if self._stream is None:
            return Mark(self._accelerator, None, False)
        event = self._accelerator.Event()
        event.record(self._stream)
        return Mark(self._accelerator, event, self._orders)
