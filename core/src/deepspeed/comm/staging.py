"""Memory for values of other ranks that are about to be added, kept between collectives.

A transport takes a buffer per collective or per sum, and gives it back when the values are added. Fresh
memory would cost a page fault per 4 KiB at every bucket, which is as long as the sum itself.
"""

import threading

import torch

_ROUND_BYTES = 1 << 12
# A free buffer more than this many times larger than asked for is left for a larger collective.
_MAX_WASTE = 4


class StagingPool:
    """Byte buffers per device, at most `limit_bytes` in all, or a single larger one."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()  # groups share the pool, and threads may have a group each
        self._free: list[torch.Tensor] = []
        self._taken_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are taken or free."""
        return self._taken_bytes + sum(buffer.numel() for buffer in self._free)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A buffer to give back later (None for nothing) and its first `numel` elements of `dtype`, uninitialized."""
        if numel == 0:
            return None, torch.empty(0, dtype=dtype, device=device)
        num_bytes = numel * dtype.itemsize
        with self._lock:
            buffer = self._take(num_bytes, device)
        return buffer, buffer[:num_bytes].view(dtype)

    def _take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        fitting = [
            b
            for b in self._free
            if b.device == device and num_bytes <= b.numel() <= num_bytes * _MAX_WASTE + _ROUND_BYTES
        ]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
            # By identity: `list.remove` would compare tensors element by element.
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._make_space(num_bytes)
            rounded = -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES
            buffer = torch.empty(rounded, dtype=torch.uint8, device=device)
        self._taken_bytes += buffer.numel()
        return buffer

    def give_back(self, buffer: torch.Tensor | None) -> None:
        """Return a buffer from `take`; it is kept if the limit allows."""
        if buffer is None:
            return
        with self._lock:
            self._taken_bytes -= buffer.numel()
            if self.held_bytes + buffer.numel() <= self.limit_bytes:
                self._free.append(buffer)

    def release(self) -> None:
        """Drop the free buffers."""
        with self._lock:
            self._free.clear()

    def _make_space(self, num_bytes: int) -> None:
        """Drop free buffers, the oldest first, so that a new one stays within the limit."""
        while self._free and self.held_bytes + num_bytes > self.limit_bytes:
            self._free.pop(0)
