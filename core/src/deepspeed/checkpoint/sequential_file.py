"""`SequentialFile`: a new file, written in order, past the page cache where its file system allows that (O_DIRECT).

A file that goes through the page cache is copied there, and written back by the kernel: that takes several times the
processor time of all the rest of a save, also from training. Here a thread gives blocks to the disk, while the next one
is filled and its checksum computed.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

_BLOCK_BYTES = 4 * 2**20  # of one write; with more in flight the disk does not find it in the processor's cache
_NUM_BLOCKS = 2  # one is filled, one is written
_FLUSH_BYTES = 64 * 2**20  # between two calls of fdatasync where the page cache is used, so that the disk has work
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class SequentialFile:
    """What `torch.save` needs of a file. A context manager; `sync` is its last call inside.

    Args:
        path: is created, or emptied.

    Raises:
        OSError: here, or in any later call, for what the thread has met.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor, self._is_direct = _open(path)
        self._thread = ThreadPoolExecutor(1, "ds-write")  # is started by the first full block
        self._written: deque[tuple[Future[None], memoryview]] = deque()
        self._lasting: list[Future[None]] = []
        self._offset = 0  # of the block that is filled
        self._block, self._filled = _new_block(), 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while view:
            part = view[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == len(self._block):
                self._pass_on()
        return len(data)

    def write_lasting(self, data: memoryview) -> None:
        """As the first `write`, of memory that begins at a page and does not change until `sync`: it is not copied."""
        assert self._offset + self._filled == 0
        for first in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            block = data[first : first + _BLOCK_BYTES]
            self._lasting.append(self._thread.submit(self._put, block, first))
            self._offset += _BLOCK_BYTES
        self.write(data[self._offset :])

    def flush(self) -> None:
        """Blocks go to the disk when they are full."""

    def sync(self) -> int:
        """Wait until the file is durable; returns its bytes."""
        for each in (*self._lasting, *(write for write, _ in self._written)):
            each.result()
        if self._is_direct:
            self._use_page_cache()  # the last block is no multiple of a disk's sector
        _write_all(self._descriptor, self._block[: self._filled], self._offset)
        os.fsync(self._descriptor)
        return self._offset + self._filled

    def __enter__(self) -> "SequentialFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def _pass_on(self) -> None:
        self._written.append((self._thread.submit(self._put, self._block, self._offset), self._block))
        self._offset += self._filled
        self._filled = 0
        if len(self._written) < _NUM_BLOCKS:
            self._block = _new_block()
        else:
            written, self._block = self._written.popleft()
            written.result()

    def _put(self, block: memoryview, offset: int) -> None:
        """In the thread."""
        try:
            _write_all(self._descriptor, block, offset)
        except OSError as error:
            if not (self._is_direct and error.errno == errno.EINVAL):
                raise
            self._use_page_cache()  # the file system takes the flag, and does not do it
            _write_all(self._descriptor, block, offset)
        end = offset + len(block)
        if not self._is_direct and offset // _FLUSH_BYTES != end // _FLUSH_BYTES:
            _fdatasync(self._descriptor)  # what it reports, the last fsync would not report again

    def _use_page_cache(self) -> None:
        self._is_direct = False
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it is past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o666), False


def _new_block() -> memoryview:
    return memoryview(mmap.mmap(-1, _BLOCK_BYTES))  # begins at a page, as O_DIRECT needs


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.pwrite(descriptor, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes
