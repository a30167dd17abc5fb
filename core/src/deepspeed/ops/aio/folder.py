"""`aio_handle` creates a handle of the op `async_io`. `preflight` checks, before training starts, whether offload can
write its files to a folder.
"""

import errno
import mmap
import os
import re
import resource
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.errors import ConfigError
from deepspeed.ops import registry


def aio_handle(
    block_size: int = 1_048_576,
    queue_depth: int = 8,
    single_submit: bool = False,
    overlap_events: bool = False,
    intra_op_parallelism: int = 1,
) -> Any:
    """Return a handle for asynchronous reads and writes between host tensors and files, with DeepSpeed's methods.

    Methods: `read`, `write`, `pread`, `pwrite`, `sync_pread`, `sync_pwrite`, `async_pread`, `async_pwrite`, `wait`,
    `new_cpu_locked_tensor`, `free_cpu_locked_tensor` and getters of the arguments.

    Args:
        block_size: size of one request in bytes.
        queue_depth: number of requests in flight per worker.
        single_submit: submit requests one by one instead of in batches.
        overlap_events: submit the next request as soon as one finishes; otherwise wait for each batch of `queue_depth`
            requests before the next batch.
        intra_op_parallelism: number of workers that share the requests of each operation.

    Raises:
        OpUnavailable: no extension provides the op `async_io` here; the message gives every reason.
        ValueError: an argument is out of range.
    """
    return registry.require("async_io").aio_handle(
        block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
    )


_MOUNTS = Path("/proc/self/mounts")
_STATUS = Path("/proc/self/status")
#: the capability that lifts the limit on locked memory
_CAP_IPC_LOCK = 14
#: file systems that keep files in memory
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class FolderReport:
    """`FolderReport` holds the result of `preflight` for a usable folder.

    Attributes:
        folder: the absolute path.
        file_system: the kernel's name of the file system, such as `"ext4"`, or "unknown".
        free_bytes: bytes that this user can still write.
        direct: files can be opened with O_DIRECT, which bypasses the page cache.
        alignment: bytes; I/O at offsets and addresses that are multiples of it needs no copy.
        memlock_bytes: bytes that this process may lock in memory; None: unlimited.
        remarks: performance problems, and what to do about them.
    """

    folder: str
    file_system: str
    free_bytes: int
    direct: bool
    alignment: int
    memlock_bytes: int | None
    remarks: tuple[str, ...] = ()


def preflight(folder: str | os.PathLike[str], num_bytes: int, locked_bytes: int = 0) -> FolderReport:
    """Check that files of `num_bytes` in total can be written to `folder` and read again. Leaves no file there.

    Called before offload starts.

    Args:
        folder: an existing folder.
        num_bytes: total size of the files that this process will have there at the same time.
        locked_bytes: size of the memory that this process will lock.

    Raises:
        ConfigError: the folder is missing or not a folder, cannot be written or read, or is too small.
    """
    path = Path(folder)
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {problem}; create it on a local disk, or name another folder")
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < num_bytes:
        raise ConfigError(
            f"{path} has {_text(free_bytes)} free and {_text(num_bytes)} are needed; free "
            f"{_text(num_bytes - free_bytes)}, or name a folder on a larger disk"
        )
    direct = _write_and_read(path)
    file_system = _file_system(path)
    memlock = _memlock_bytes()
    remarks = tuple(filter(None, (_remark_on_files(file_system, direct), _remark_on_memlock(memlock, locked_bytes))))
    return FolderReport(str(path.resolve()), file_system, free_bytes, direct, mmap.PAGESIZE, memlock, remarks)


def _write_and_read(folder: Path) -> bool:
    """Write one page to a temporary file and read it again. Return whether this worked with O_DIRECT."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    wanted = bytes(range(256)) * (mmap.PAGESIZE // 256)
    page.write(wanted)
    found = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        fd, name = tempfile.mkstemp(prefix=".ds_preflight_", dir=folder)
        try:
            direct = _reopened_direct(fd, name)
            os.pwrite(fd, page, 0)
            os.preadv(fd, [found], 0)
        finally:
            os.close(fd)
            os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be used: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)}) while a "
            "file was written there and read again; check its permissions and mount options, or name another folder"
        ) from error
    if found[:] != wanted:
        raise ConfigError(f"{folder} cannot be used: a file read from it differs from what was written; check the disk")
    return direct


def _reopened_direct(fd: int, name: str) -> bool:
    """Reopen `fd` with O_DIRECT, and return whether the file system supports this."""
    if not hasattr(os, "O_DIRECT"):
        return False
    with suppress(OSError):
        direct = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.dup2(direct, fd)
        os.close(direct)
        return True
    return False


def _file_system(folder: Path) -> str:
    """Return the file system type of the mount that contains `folder`."""
    device = os.stat(folder).st_dev
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return "unknown"
    for point, kind in reversed(mounts):  # a later mount hides earlier mounts at the same point
        with suppress(OSError):
            if os.stat(point.encode().decode("unicode_escape")).st_dev == device:
                return kind
    return "unknown"


def _memlock_bytes() -> int | None:
    """Return the number of bytes that this process may lock in memory; None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    held = re.search(r"^CapEff:\s*(\w+)$", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else None
    return None if held and int(held[1], 16) >> _CAP_IPC_LOCK & 1 else limit


def _remark_on_files(file_system: str, direct: bool) -> str:
    if file_system in _IN_MEMORY:
        return f"the folder is in memory ({file_system}), so that offload to it frees none; name a folder on a disk"
    if not direct:
        return (
            f"{file_system} refuses O_DIRECT: bytes go through the page cache, slower; use ext4 or xfs on a local disk"
        )
    return ""


def _remark_on_memlock(limit: int | None, locked_bytes: int) -> str:
    if limit is None or limit >= locked_bytes:
        return ""
    return (
        f"{_text(locked_bytes)} of memory are to be locked and the limit is {_text(limit)}: the memory stays pageable; "
        "set `ulimit -l unlimited` before the program starts"
    )


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
