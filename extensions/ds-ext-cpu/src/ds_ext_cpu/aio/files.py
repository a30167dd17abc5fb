"""Opening the file of one operation: what is there, whether it does O_DIRECT, and which alignment that needs."""

import errno
import mmap
import os
import stat
from typing import Any, NamedTuple

from deepspeed.errors import counted

#: O_DIRECT is not used for offsets and addresses that need more than this
_LARGEST_ALIGN = 4096
_NOTHING_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class OpenFile(NamedTuple):
    """A file that is open for one operation, which closes it.

    Fields:
        direct_fd: opened with O_DIRECT; -1: the file system or the size of the range does not permit that.
        plain_fd: through the page cache.
        memory_align, file_align: in bytes, of addresses, and of offsets and lengths; the latter at least a page.
    """

    direct_fd: int
    plain_fd: int
    memory_align: int
    file_align: int

    def close(self) -> None:
        """Close both; only where no operation was made of it."""
        for fd in (self.direct_fd, self.plain_fd):
            if fd >= 0:
                os.close(fd)


def open_file(io: Any, path: str, write: bool, offset: int, length: int) -> OpenFile:
    """The file at `path`, checked for a read, or created and given its space for a write.

    Args:
        io: the compiled module.
        path: of a regular file; for a write it may be missing.
        write: else it is read.
        offset, length: the range in bytes.

    Raises:
        OSError: the file cannot be opened or is no regular file, the range is not in it, the file system is full. The
            message has the range, the error its errno and file.
    """
    try:
        return _open(io, path, write, offset, length)
    except OSError as error:
        raise describe(error.errno or 0, path, write, offset, length, error.strerror) from None


def describe(code: int, path: str, write: bool, offset: int, length: int, reason: str | None = None) -> OSError:
    """The error of one operation: an OSError of the class that belongs to `code`, with file, range and reason."""
    action = "write" if write else "read"
    return OSError(
        code, f"{reason or os.strerror(code)}: {action} of {counted(length, 'byte')} at offset {offset}", path
    )


def _open(io: Any, path: str, write: bool, offset: int, length: int) -> OpenFile:
    flags = (os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # a write creates it
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):  # opening a pipe would wait for its other end
        raise OSError(errno.EINVAL, "not a regular file")
    plain = os.open(path, flags, 0o666)
    opened = OpenFile(-1, plain, 1, mmap.PAGESIZE)
    try:
        size = os.fstat(plain).st_size
        if not write and offset + length > size:
            raise OSError(errno.ENODATA, f"the file ends before, it has {counted(size, 'byte')}")
        if write and offset + length > size:
            _reserve(io, plain, offset, length)
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into pages that O_DIRECT writes
        if length >= mmap.PAGESIZE:
            opened = _open_direct(io, path, flags & ~os.O_CREAT, opened)
    except BaseException:
        opened.close()
        raise
    return opened


def _reserve(io: Any, fd: int, offset: int, length: int) -> None:
    """Give a file its space and its length, so that a full disk is found at once and pieces need not extend it."""
    code = io.reserve(fd, offset, length)
    if code not in (0, *_NOTHING_THERE):
        raise OSError(code, os.strerror(code))


def _open_direct(io: Any, path: str, flags: int, opened: OpenFile) -> OpenFile:
    """`opened` with its `direct_fd`, where that is possible."""
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which means that the file system does not do it
            raise
        return opened
    memory, file = io.alignment(fd)
    memory, file = memory or _LARGEST_ALIGN, file or _LARGEST_ALIGN
    if max(memory, file) > _LARGEST_ALIGN:
        os.close(fd)
        return opened
    return OpenFile(fd, opened.plain_fd, memory, max(file, mmap.PAGESIZE))
