"""CRC-32 of the blocks of a file: computed while the file is written, and compared when it is read.

A file has one checksum per `BLOCK_BYTES`, the last block being shorter. So a reader of a part of a file verifies the
blocks that it reads, and a message says where the damage is.
"""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

BLOCK_BYTES = 64 * 2**20
_WORTH_A_THREAD_BYTES = 2**20  # less is summed sooner than a thread is woken
_READ_BYTES = 2**20  # fits into a core's cache


class ChecksumWriter:
    """A file for `torch.save` that sums what is written, in a second thread while the system takes the bytes.

    Args:
        file: open for writing, and empty; it stays open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, "checksum")
        self._sums = _BlockSums()

    def __enter__(self) -> "ChecksumWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def write(self, data: bytes | memoryview) -> int:
        if len(data) < _WORTH_A_THREAD_BYTES:
            self._sums.add(data)
            return self._file.write(data)
        summed = self._thread.submit(self._sums.add, data)
        try:
            return self._file.write(data)
        finally:
            summed.result()  # `data` is the caller's again

    def flush(self) -> None:
        self._file.flush()

    def checksums(self) -> list[str]:
        """The checksum of each block that was written, as 8 hexadecimal digits."""
        return self._sums.as_text()


class _BlockSums:
    def __init__(self) -> None:
        self._done: list[int] = []
        self._current = 0
        self._num_bytes = 0  # in the current block

    def add(self, data: bytes | memoryview) -> None:
        """Continue with more bytes; `zlib` releases the interpreter's lock."""
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
        return [f"{each:08x}" for each in (*self._done, *([self._current] if self._num_bytes else []))]


def checksums_of(path: Path, advance: Callable[[int], object] | None = None) -> list[str]:
    """The checksums of the blocks of a file, as `ChecksumWriter.checksums` gave them. Raises OSError.

    Args:
        advance: is called with the number of bytes of each part that was read, to show progress.
    """
    sums = _BlockSums()
    with path.open("rb", buffering=0) as file:
        for part in _parts(file):
            sums.add(part)
            if advance is not None:
                advance(len(part))
    return sums.as_text()


def _parts(file: "BinaryIO") -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_READ_BYTES))
    while num_bytes := file.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:num_bytes]
