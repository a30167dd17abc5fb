"""`SharedMemory`: a file in memory, without a name, into which a rank copies its states for its writer process."""

import mmap
import os
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.checkpoint.tensors import with_placeholders
from deepspeed.checkpoint.torch_store import write_state
from deepspeed.zero.pending_tensor import PendingTensor

_FIRST_BYTES = 64 * 2**20
_MIN_TAKEN_BYTES = 16 * 2**20  # at a time, as far as the mapping goes


class SharedMemory:
    """What `torch.save` needs of a file, over a mapping: where its pages were used before, a write is a plain copy.

    Memory is taken as it is written to, and stays for the next save. Where the system refuses it, `write` raises
    OSError: a full temporary folder, or strict accounting of memory (vm.overcommit_memory=2). A process that exceeds
    the memory of its container or machine is killed all the same.
    """

    def __init__(self) -> None:
        self.position = 0
        self._taken_bytes = 0
        self._descriptor = _anonymous_file()
        self._pending: dict[tuple[int, int], PendingTensor] = {}  # by address and bytes of its placeholder
        self._places: list[tuple[int, int, PendingTensor]] = []  # first byte and end of those that are still to copy
        self._map(_FIRST_BYTES)

    def fileno(self) -> int:
        return self._descriptor

    def begin(self) -> None:
        """Write from the first byte on again, over what an earlier save left; forget what it did not copy."""
        self.position = 0
        self._places.clear()

    def write_state(self, state: Any) -> None:
        """Write what `torch.save` makes of `state`. `copy_pending` copies those of its `PendingTensor`s that are
        held."""
        try:
            write_state(with_placeholders(state, self._placeholder), self)
            assert not self._pending, "torch.save has written other memory than that of its tensors"
        finally:
            self._pending.clear()

    def copy_pending(self) -> None:
        """Copy what `write_state` has left."""
        try:
            for first, end, tensor in self._places:
                tensor.copy_to(self._mapped[first:end])
        finally:
            self._places.clear()

    def write(self, data: bytes | memoryview) -> int:
        source = np.frombuffer(data, np.uint8)  # copied by numpy, other threads go on meanwhile
        first, end = self.position, self.position + source.nbytes
        if end > self._mapped.nbytes:
            self._map(2 * end)
        if end > self._taken_bytes:
            self._take(end)
        pending = self._pending.pop((source.ctypes.data, source.nbytes), None) if self._pending else None
        if pending is None:
            self._mapped[first:end] = source
        elif pending.is_held:
            self._places.append((first, end, pending))
        else:
            pending.copy_to(self._mapped[first:end])
        self.position = end
        return source.nbytes

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)

    def _placeholder(self, pending: PendingTensor) -> Tensor:
        """A tensor that `torch.save` takes for `pending`; its memory is never touched."""
        tensor = torch.empty(pending.shape, dtype=pending.dtype)
        if tensor.numel():
            self._pending[tensor.data_ptr(), tensor.nbytes] = pending
        return tensor

    def _map(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        self._mapped = np.frombuffer(mmap.mmap(self._descriptor, num_bytes), np.uint8)

    def _take(self, end: int) -> None:
        """Have memory for all bytes up to `end`: a page that cannot be had when it is written to ends the process."""
        end = min(max(end, self._taken_bytes + _MIN_TAKEN_BYTES), self._mapped.nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, self._taken_bytes, end - self._taken_bytes)
        self._taken_bytes = end


def _anonymous_file() -> int:
    """In memory; where the system cannot do that, in the temporary folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deepspeed-staged-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
