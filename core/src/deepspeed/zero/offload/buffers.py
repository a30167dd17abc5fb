"""Host memory that the device copies from and to: page-locked on request, and a ring of buffers of it.

Used by `HostPlacement` and `HostShards`.
"""

import torch
from torch import Tensor

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.errors import first_line
from deepspeed.log import warn_once
from deepspeed.zero.offload.lane import Mark


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
    """`count` staging buffers taken in turn; one is taken again only when the copy that used it last is done."""

    def __init__(self, memory: HostMemory, count: int) -> None:
        self._memory = memory
        self._buffers: list[Tensor | None] = [None] * count  # bytes
        self._busy: list[Mark | None] = [None] * count
        self._place = 0  # of the buffer that was taken last

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of arbitrary contents."""
        self._place = place = (self._place + 1) % len(self._buffers)
        busy = self._busy[place]
        if busy is not None:
            busy.wait_on_host()
            self._busy[place] = None
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers[place]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[place] = self._memory.allocate(num_bytes, torch.uint8)
        return buffer[:num_bytes].view(dtype)

    def hold_last(self, until: Mark) -> None:
        """The buffer that was taken last is in use until then."""
        self._busy[self._place] = until

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def release(self) -> None:
        """Drop the buffers, once the copies that use them are done."""
        for busy in self._busy:
            if busy is not None:
                busy.wait_on_host()
        self._buffers = [None] * len(self._buffers)
        self._busy = [None] * len(self._busy)
