"""CRC-32 of the blocks of a file: computed while the file is written, and compared when it is read.

A file has one checksum per `BLOCK_BYTES`, the last block being shorter. So a reader of a part of a file verifies the
blocks that it reads, and a message says where the damage is.
"""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.location import is_remote

BLOCK_BYTES = 64 * 2**20
_PART_BYTES = 2**20  # fits into a core's cache
_NUM_READERS = 2  # one waits for the disk or copies, the other sums


class ChecksumWriter:
    """A file for `torch.save` that sums what is written, a part at a time: the system copies it out of the cache then.

    A second thread that sums meanwhile is slower, since it reads the memory once more.

    Args:
        file: open for writing, and empty; it stays open.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._sums = BlockSums()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for first in range(0, len(view), _PART_BYTES):
            part = view[first : first + _PART_BYTES]
            self._sums.add(part)
            self._file.write(part)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def checksums(self) -> list[str]:
        """As `BlockSums.as_text`, of what was written."""
        return self._sums.as_text()


class BlockSums:
    """The checksums of what is added."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current = 0
        self._num_bytes = 0  # in the current block

    def add(self, data: bytes | memoryview) -> None:
        """Continue with more bytes."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self._num_bytes]
            self._current = zlib.crc32(part, self._current)
            self._num_bytes += len(part)
            view = view[len(part) :]
            if self._num_bytes == BLOCK_BYTES:
                self._done.append(self._current)
                self._current, self._num_bytes = 0, 0

    def as_text(self) -> list[str]:
        """The checksum of each block so far, as 8 hexadecimal digits."""
        return [_as_text(each) for each in (*self._done, *([self._current] if self._num_bytes else []))]


def _as_text(value: int) -> str:
    return f"{value:08x}"


def checksums_of(path: Path, advance: Callable[[int], object] | None = None) -> list[str]:
    """The checksums of the blocks of a file, as `ChecksumWriter.checksums` gave them. Raises OSError.

    Args:
        advance: is called with the number of bytes of each part that was read, to show progress.
    """
    if is_remote(path):
        return _sums_in_order(path, advance)
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_NUM_READERS, "ds-verify") as threads:
        size = os.fstat(file.fileno()).st_size
        firsts = range(0, size, BLOCK_BYTES)
        sums = []
        for first, value in zip(firsts, threads.map(partial(_sum_of_block, file.fileno()), firsts), strict=True):
            sums.append(_as_text(value))
            if advance is not None:
                advance(min(BLOCK_BYTES, size - first))
    return sums


def _sum_of_block(descriptor: int, first: int) -> int:
    """In a thread: the disk reads ahead, and the processor sums what another thread's block waits for."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, first, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
    buffer, value, position = memoryview(bytearray(_PART_BYTES)), 0, first
    while num_bytes := os.preadv(descriptor, [buffer[: first + BLOCK_BYTES - position]], position):
        value = zlib.crc32(buffer[:num_bytes], value)
        position += num_bytes
    return value


def _sums_in_order(path: Path, advance: Callable[[int], object] | None) -> list[str]:
    """Of an object in an object store, which has one stream."""
    sums = BlockSums()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            sums.add(part)
            if advance is not None:
                advance(len(part))
    return sums.as_text()
