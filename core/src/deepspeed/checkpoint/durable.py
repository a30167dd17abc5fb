"""Write files that are either whole or not there: temporary name, fsync, rename, fsync of the folder.

`SequentialFile` is a new file that is written in order, past the page cache if its file system allows that (O_DIRECT).
Through the page cache a file is copied, and written back by the kernel: that takes several times the processor time of
all the rest of a save, also from training. Here a thread writes blocks to the disk, while the next one is filled and
its checksum computed.

`ChecksumWriter` computes checksums of blocks while a file is written.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspeed.checkpoint.layout import is_remote, reason_of
from deepspeed.errors import CheckpointError
from deepspeed.log import logger

_BLOCK_BYTES = 4 * 2**20  # of one write; more bytes in flight would leave the processor's cache before the write
_NUM_BLOCKS = 2  # one is filled, one is written
_FLUSH_BYTES = 64 * 2**20  # between two calls of fdatasync if the page cache is used, to keep the disk busy
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class SequentialFile:
    """A `SequentialFile` is a file for `torch.save`, and a context manager; `sync` is the last call inside.

    Args:
        path: file to create, or to empty.

    Raises:
        OSError: here, or in any later call, if the thread cannot write.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor, self._is_direct = _open(path)
        self._thread = ThreadPoolExecutor(1, "ds-write")  # started by the first full block
        self._written: deque[tuple[Future[None], memoryview]] = deque()
        self._lasting: list[Future[None]] = []
        self._offset = 0  # of the current block
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
        """Write the file's first bytes from memory that begins at a page and stays as it is until `sync`.

        Whole blocks are not copied; only the rest after the last one is.
        """
        assert self._offset + self._filled == 0
        for first in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            block = data[first : first + _BLOCK_BYTES]
            self._lasting.append(self._thread.submit(self._put, block, first))
            self._offset += _BLOCK_BYTES
        self.write(data[self._offset :])

    def flush(self) -> None:
        """Do nothing: blocks are written when they are full."""

    def sync(self) -> int:
        """Wait until the file is durable; return its number of bytes."""
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
        """Write a block at `offset` of the file; runs in the thread."""
        try:
            _write_all(self._descriptor, block, offset)
        except OSError as error:
            if not (self._is_direct and error.errno == errno.EINVAL):
                raise
            self._use_page_cache()  # the file system accepts the flag, and refuses the write
            _write_all(self._descriptor, block, offset)
        end = offset + len(block)
        if not self._is_direct and offset // _FLUSH_BYTES != end // _FLUSH_BYTES:
            _fdatasync(self._descriptor)  # raises errors that the last fsync would not report again

    def _use_page_cache(self) -> None:
        self._is_direct = False
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether it bypasses the page cache."""
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


def write_file(path: Path, write: Callable[[Any], Any], temporary: Path | None = None) -> int:
    """Write `path` with `write(file)`, so that a crash leaves either its former content or the whole new one.

    Args:
        write: gets the part of a file that `torch.save` needs: `write` and `flush`.
        temporary: file that is written first, on the same file system, and by no other process at the same time;
            default: `.<name>.tmp` beside `path`. The name does not vary, so that a later save overwrites the file of a
            killed process.

    Returns the number of bytes.

    The *name* is durable only after `sync_folder(path.parent)`, which the caller runs once for all files of a folder.
    Raises `CheckpointError` if the disk refuses; nothing is then left behind.
    """
    if is_remote(path):
        return _write_object(path, write)
    temporary = path.with_name(f".{path.name}.tmp") if temporary is None else temporary
    try:
        with SequentialFile(temporary) as file:
            write(file)
            size = file.sync()
        os.replace(temporary, path)
        return size
    except (OSError, RuntimeError) as error:  # torch.save turns the file's OSError into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error("write", path, error) from error


def _write_object(path: Path, write: Callable[[Any], Any]) -> int:
    """Write an object in an object store, and return the number of bytes. The object replaces its former version when
    its file is closed, so an object that an error or an interrupt cuts short is discarded instead."""
    try:
        file = path.open("wb")
        try:
            write(file)
        except BaseException:
            _discard(file)
            raise
        file.close()
        return path.stat().st_size
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write {path}: {reason_of(error)}. Former checkpoints are untouched. Check the bucket and its "
            "permissions."
        ) from error


def _discard(file: Any) -> None:
    """Cancel the upload of a file of fsspec, which would otherwise be completed when the file is collected."""
    try:
        file.discard()
    except Exception as error:  # noqa: BLE001 - any of the protocol's package; the one that led here is raised
        logger.warning("the parts of %s that were uploaded were not removed: %s", file.path, error)
    file.closed = True


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (creations, renames, deletions) durable."""
    if is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and make their names durable. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room in that folder"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Give a folder, or a name that is not taken"),
    errno.ENOENT: "Give all ranks one tag, and a folder that every rank sees",
}


def disk_error(action: str, path: Path, error: BaseException) -> CheckpointError:
    """Return the error to raise if the disk refused to `action` ("write", "replace") `path`."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = reason_of(cause) if isinstance(cause, OSError) else str(error)
    code = cause.errno if isinstance(cause, OSError) else None
    advice = _ADVICE.get(code or 0, "Correct the permissions of that folder, which every rank must see")
    return CheckpointError(
        f"cannot {action} {path}: {reason}{_free_space(path)}. The former checkpoint is untouched. {advice}, then save "
        "again."
    )


def _free_space(path: Path) -> str:
    """Return a clause for error messages on the free space where `path` should lie; empty if that is unknown."""
    for folder in path.parents:
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there)"
    return ""


BLOCK_BYTES = 64 * 2**20
PART_BYTES = 2**20  # fits into a core's cache


class ChecksumWriter:
    """`ChecksumWriter` is a file for `torch.save` that sums each part just before the write, when it is in the cache.

    A second thread for the sums would be slower, since it reads the memory once more.

    Args:
        file: open for writing, and empty; it stays open.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._sums = BlockSums()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for first in range(0, len(view), PART_BYTES):
            part = view[first : first + PART_BYTES]
            self._sums.add(part)
            self._file.write(part)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def checksums(self) -> list[str]:
        """Return the checksums of the written bytes, as `BlockSums.as_text` returns them."""
        return self._sums.as_text()


class BlockSums:
    """`BlockSums` computes the checksums of the bytes that are added."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current = 0
        self._num_bytes = 0  # in the current block

    def add(self, data: bytes | memoryview) -> None:
        """Add more bytes."""
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
        """Return the checksum of each block so far, as 8 hexadecimal digits."""
        return [f"{each:08x}" for each in (*self._done, *([self._current] if self._num_bytes else []))]
