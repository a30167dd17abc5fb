"""Sums of what the ranks contributed, in the order of ranks, so that every rank computes the same bits.

Transports that add by themselves, instead of the library, take a buffer of a `StagingPool` per collective or sum for
the values of other ranks, and give it back when these are added: fresh memory would cost a page fault per 4 KiB
at every bucket, which is as long as the sum itself.
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


# A low-precision sum of three or more ranks goes through fp32 in blocks that stay in a core's cache (512 KiB).
_BLOCK_NUMEL = 1 << 17


def add_in_rank_order(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    """`own = x_0 + x_1 + ... + x_{W-1}`, left to right, where `own` is `x_rank` and `others` the rest by rank.

    `others` are overwritten. With three or more low-precision summands the sum runs in fp32 and is rounded once, as
    one addition of two does anyway.
    """
    if own.dtype in (torch.bfloat16, torch.float16) and len(others) > 1:
        _add_in_fp32(own, others, rank)
        return
    # x_0 .. x_{rank-1} add up in the first of them; then own joins (a + b is b + a to the last bit); then the rest.
    if rank > 0:
        for other in others[1:rank]:
            others[0].add_(other)
        own.add_(others[0])
    for other in others[rank:]:
        own.add_(other)


def _add_in_fp32(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    sum_B = torch.empty(min(_BLOCK_NUMEL, own.numel()), dtype=torch.float32, device=own.device)
    terms = [*others[:rank], own, *others[rank:]]
    for start in range(0, own.numel(), _BLOCK_NUMEL):
        stop = min(start + _BLOCK_NUMEL, own.numel())
        block = sum_B[: stop - start]
        block.copy_(terms[0][start:stop])
        for term in terms[1:]:
            block.add_(term[start:stop])
        own[start:stop].copy_(block)
