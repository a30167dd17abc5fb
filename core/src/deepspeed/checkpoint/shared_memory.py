"""`SharedMemory`: a file in memory, without a name, into which a rank copies its states for its writer process."""

import mmap
import os
import tempfile

import numpy as np

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
        self._map(_FIRST_BYTES)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes | memoryview) -> int:
        source = np.frombuffer(data, np.uint8)  # copied by numpy, other threads go on meanwhile
        first, end = self.position, self.position + source.nbytes
        if end > self._mapped.nbytes:
            self._map(2 * end)
        if end > self._taken_bytes:
            self._take(end)
        self._mapped[first:end] = source
        self.position = end
        return source.nbytes

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)

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
