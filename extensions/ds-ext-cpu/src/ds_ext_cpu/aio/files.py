"""`open_file` opens the file of one operation, with O_DIRECT if possible, and finds the required alignment."""

import errno
import mmap
import os
import stat
from typing import Any, NamedTuple

from deepspeed.errors import counted

#: O_DIRECT is not used if it requires a larger alignment of offsets or addresses
_LARGEST_ALIGN = 4096
_NOTHING_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class OpenFile(NamedTuple):
    """A file that is open for one operation. The operation closes the file.

    Fields:
        direct_fd: descriptor opened with O_DIRECT; -1 if the file system or the size of the range does not permit it.
        plain_fd: descriptor for I/O through the page cache.
        memory_align, file_align: alignment in bytes of addresses, and of offsets and lengths (at least a page).
    """

    direct_fd: int
    plain_fd: int
    memory_align: int
    file_align: int

    def close(self) -> None:
        """Close both descriptors. Only for a file that was not passed to an operation."""
        for fd in (self.direct_fd, self.plain_fd):
            if fd >= 0:
                os.close(fd)


def open_file(io: Any, path: str, write: bool, offset: int, length: int) -> OpenFile:
    """Open the file at `path`. For a read, check that the range exists; for a write, create the file and reserve space.

    Args:
        io: the compiled module.
        path: path of a regular file. For a write, the file may be missing.
        write: whether the operation is a write.
        offset, length: the range in bytes.

    Raises:
        OSError: the file cannot be opened or is not a regular file, the range of a read is not in the file, or the file
            system is full. The message has the range; the error has the errno and the file name.
    """
    try:
        return _open(io, path, write, offset, length)
    except OSError as error:
        raise describe(error.errno or 0, path, write, offset, length, error.strerror) from None


def describe(code: int, path: str, write: bool, offset: int, length: int, reason: str | None = None) -> OSError:
    """Return the error of one operation: an OSError of the subclass for errno `code`, with file, range and reason."""
    action = "write" if write else "read"
    return OSError(
        code, f"{reason or os.strerror(code)}: {action} of {counted(length, 'byte')} at offset {offset}", path
    )


def _open(io: Any, path: str, write: bool, offset: int, length: int) -> OpenFile:
    flags = (os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # a write creates the file
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):  # opening a pipe would block until its other end is opened
        raise OSError(errno.EINVAL, "not a regular file")
    plain = os.open(path, flags, 0o666)
    opened = OpenFile(-1, plain, 1, mmap.PAGESIZE)
    try:
        size = os.fstat(plain).st_size
        if not write and offset + length > size:
            raise OSError(errno.ENODATA, f"the file ends before, it has {counted(size, 'byte')}")
        if write and offset + length > size:
            _reserve(io, plain, offset, length)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)  # prevents read-ahead into pages that O_DIRECT writes
        if length >= mmap.PAGESIZE:
            opened = _open_direct(io, path, flags & ~os.O_CREAT, opened)
    except BaseException:
        opened.close()
        raise
    return opened


def _reserve(io: Any, fd: int, offset: int, length: int) -> None:
    """Reserve space and set the file length, so a full disk is found at once and no piece has to extend the file."""
    code = io.reserve(fd, offset, length)
    if code not in (0, *_NOTHING_THERE):
        raise OSError(code, os.strerror(code))


def _open_direct(io: Any, path: str, flags: int, opened: OpenFile) -> OpenFile:
    """Return `opened` with a `direct_fd` if O_DIRECT is possible, else unchanged."""
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system does not support O_DIRECT
            raise
        return opened
    memory, file = io.alignment(fd)
    memory, file = memory or _LARGEST_ALIGN, file or _LARGEST_ALIGN
    if max(memory, file) > _LARGEST_ALIGN:
        os.close(fd)
        return opened
    return OpenFile(fd, opened.plain_fd, memory, max(file, mmap.PAGESIZE))
