"""`aio_handle` makes a handle of the op `async_io`; `preflight` says whether a folder can take the files of offload,
before training starts.
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
    """A handle for asynchronous reads and writes between host tensors and files, with DeepSpeed's methods.

    `read`, `write`, `pread`, `pwrite`, `sync_pread`, `sync_pwrite`, `async_pread`, `async_pwrite`, `wait`,
    `new_cpu_locked_tensor`, `free_cpu_locked_tensor` and the getters of the arguments.

    Args:
        block_size: bytes of one request.
        queue_depth: requests in flight per worker.
        single_submit: submit requests one by one instead of in batches.
        overlap_events: a finished request makes room for the next one at once; otherwise each batch of `queue_depth`
            requests is finished before the next.
        intra_op_parallelism: workers, which share the requests of each operation.

    Raises:
        OpUnavailable: no extension serves the op `async_io` here; the message gives every reason.
        ValueError: an argument is out of its range.
    """
    return registry.require("async_io").aio_handle(
        block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
    )


_MOUNTS = Path("/proc/self/mounts")
_STATUS = Path("/proc/self/status")
#: the capability that the limit of locked memory does not hold for
_CAP_IPC_LOCK = 14
#: the file systems whose files are memory
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class FolderReport:
    """`FolderReport` says what `preflight` found in a folder that can be used.

    Attributes:
        folder: its absolute path.
        file_system: its type as the kernel calls it, `"ext4"`; "unknown" where it does not say.
        free_bytes: what this user may still write.
        direct: files can be opened with O_DIRECT, past the page cache.
        alignment: bytes; offsets and addresses that are multiples of it are read and written without a copy.
        memlock_bytes: bytes that this process may lock in memory; None: unlimited.
        remarks: what works but slowly, and what to do about it.
    """

    folder: str
    file_system: str
    free_bytes: int
    direct: bool
    alignment: int
    memlock_bytes: int | None
    remarks: tuple[str, ...] = ()


def preflight(folder: str | os.PathLike[str], num_bytes: int, locked_bytes: int = 0) -> FolderReport:
    """Check that files of `num_bytes` together can be written into `folder` and read again. Leaves no file there.

    Called before the first byte is offloaded.

    Args:
        folder: an existing folder.
        num_bytes: of all files that this process will have there at the same time.
        locked_bytes: of memory that it will lock; 0: none.

    Raises:
        ConfigError: the folder is missing, is no folder, cannot be written to or read back, or is too small.
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
    """Write one page into a file of its own and read it again; whether that went with O_DIRECT."""
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
    """Put a descriptor with O_DIRECT in the place of `fd`, where the file system does that."""
    if not hasattr(os, "O_DIRECT"):
        return False
    with suppress(OSError):
        direct = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.dup2(direct, fd)
        os.close(direct)
        return True
    return False


def _file_system(folder: Path) -> str:
    """The type of the mount that `folder` is in."""
    device = os.stat(folder).st_dev
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return "unknown"
    for point, kind in reversed(mounts):  # the last one hides those below it
        with suppress(OSError):
            if os.stat(point.encode().decode("unicode_escape")).st_dev == device:
                return kind
    return "unknown"


def _memlock_bytes() -> int | None:
    """Return the number of bytes that this process may lock in memory; None: there is no limit."""
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
