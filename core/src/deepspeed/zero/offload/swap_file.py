"""Swap files: preallocated space on a disk for tensors, and asynchronous reads and writes of it.

    folder = SwapFolder(nvme_path, rank=rank)
    file = SwapFile(folder.path / "optimizer.swap")
    region = file.allocate(tensor.nbytes)                    # raises if the disk is full, before training starts
    reads, writes = SwapQueue(aio), SwapQueue(aio)           # `aio`: the section of the configuration
    writes.write(region, tensor).wait()                      # `tensor` must not change until then
    reads.read(region, tensor).wait()                        # `tensor` must not be read until then

Operations in flight have no order: wait for a write before you read its range, and the other way around. A file that
was removed, replaced or cut off raises an error at its next use; it is never silently created again, with holes.

`SwapFolder` is a folder of one run on a local disk for data that does not fit in memory. Placements on NVMe create one
per engine and rank, below `nvme_path`:

    <nvme_path>/ds_swap_<host>_<job>_rank<rank>_pid<pid>_<random>/      mode 0700
        owner.lock      locked as long as the process lives
        ...             swap files

Nothing in it outlives the run: it is removed when the engine is destroyed and at a normal exit. Leftovers of a killed
process are removed by the next process that creates a folder at the same place on the same host: if the lock can be
taken, the owner is dead. A forked child, such as a DataLoader worker, does not keep the lock of a process that was
killed. A resumed run needs no old swap file, because the checkpoint has everything.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from deepspeed.config.training import AioConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.log import logger
from deepspeed.ops.aio import aio_handle
from deepspeed.zero.offload.buffers import ALIGNMENT

PREFIX = "ds_swap_"
_LOCK = "owner.lock"
#: prefix of folders whose lock is not locked yet; `nvme_path` itself is locked meanwhile
_UNFINISHED = ".ds_new_swap_"
#: descriptors of the locks of this process
_locks: set[int] = set()


class SwapFolder:
    """`SwapFolder` creates a folder below `nvme_path`, after removing leftovers of dead processes of this host.

    Args:
        nvme_path: a folder that this user may write. A missing folder is created with its parents, for this user alone;
            it outlives the run.
        rank: rank of this process, for the name.
        key: configuration key, for errors.

    Attributes:
        path: path of the folder.

    Raises:
        ConfigError: if the folder cannot be created; names the key and the reason.
    """

    def __init__(self, nvme_path: str | os.PathLike[str], *, rank: int, key: str) -> None:
        parent = Path(nvme_path).absolute()
        if os.path.exists(parent) and not os.path.isdir(parent):
            raise ConfigError(f"{key}: {parent} is not a folder; name a folder on a local disk")
        try:
            _make_private(parent)
            sweep(parent)
            self.path, self._lock = _make(parent, rank)
        except (OSError, ValueError) as error:  # ValueError: for a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{key}: no folder can be made in {parent}: {reason}; check its permissions and mount, or "
                "name another folder"
            ) from error
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder and its contents. Also called on garbage collection and at exit. Idempotent."""
        self._remove()


def _make_private(folder: Path) -> None:
    """Create the folder and its missing parents; other ranks may create them at the same time."""
    for each in reversed([folder, *folder.parents]):
        if not each.is_dir():
            with suppress(FileExistsError):  # if it is a file, the next mkdir fails
                each.mkdir(mode=0o700)


def sweep(parent: Path) -> list[Path]:
    """Remove the folders of dead processes of this host below `parent`; return them."""
    swept = []
    for folder in sorted(parent.glob(f"{PREFIX}{_host()}_*")):
        if (lock := _take_lock(folder)) is not None:
            if _delete(folder):
                swept.append(folder)
            os.close(lock)
    if swept:
        dead = counted(len(swept), "dead process", "dead processes")
        logger.info("nvme_path: removed what %s left in %s", dead, parent)
    return swept


def _make(parent: Path, rank: int) -> tuple[Path, int]:
    """Create a folder with a locked lock. It gets its final name last, so that no sweep finds it without a lock."""
    prefix = f"{_UNFINISHED}{_host()}_"
    with _locked(parent) as is_alone:
        for left in parent.glob(f"{prefix}*") if is_alone else ():  # by a process that was killed in this function
            _delete(left)
        unfinished = tempfile.mkdtemp(prefix=prefix, dir=parent)  # mode 0700
        lock = os.open(f"{unfinished}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _locks.add(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        random = unfinished.rpartition(prefix)[2]
        path = parent / f"{PREFIX}{_host()}_{_job()}_rank{rank}_pid{os.getpid()}_{random}"
        os.rename(unfinished, path)
    return path, lock


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Let one process of this host at a time enter. Yield False if the file system cannot lock folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    is_locked = False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_locked = True
        yield is_locked
    finally:
        if is_locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough when a fork has the descriptor too
        os.close(descriptor)


def _take_lock(folder: Path) -> int | None:
    """Return the locked descriptor of the folder's lock; None: its owner lives, or another process removes it."""
    lock = None
    with suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    if lock is not None:
        os.close(lock)
    return None


def _remove(path: Path, lock: int, pid: int) -> None:
    """Delete the folder and close its lock, except in a forked child, which inherits the finalizer."""
    if os.getpid() == pid:
        _delete(path)
        _locks.discard(lock)
        os.close(lock)


def _close_locks() -> None:
    """Close the locks in a forked child, since a lock is held until all processes have closed it."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_locks)


def _delete(folder: Path) -> bool:
    """Delete the folder and return whether it is gone; if not, log a warning about what remains."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return True
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*"))
    logger.warning("cannot remove the swap folder %s, of %.1f MiB; remove it by hand", folder, num_bytes / 2**20)
    return False


def _host() -> str:
    return _plain(socket.gethostname())


def _job() -> str:
    """Return the run's id from the launcher or the scheduler, as part of a file name; else "run"."""
    return _plain(os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or "run")


def _plain(text: str) -> str:
    """Return `text` as part of a file name, without underscores, which separate the parts."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", text)[:40] or "unknown"


@dataclass(frozen=True, slots=True)
class Region:
    """`Region` is `num_bytes` of a swap file from `offset`, which is a multiple of `ALIGNMENT`.

    Tensors whose address is also a multiple (`HostMemory.aligned`) are moved without a copy.
    """

    file: "SwapFile"
    offset: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.num_bytes

    def part(self, start: int, num_bytes: int) -> "Region":
        """Return `num_bytes` of the region from byte `start`, which is also a multiple of `ALIGNMENT`."""
        assert start % ALIGNMENT == 0, start
        assert start + num_bytes <= self.num_bytes, (start, num_bytes, self.num_bytes)
        return Region(self.file, self.offset + start, num_bytes)


def padded(num_bytes: int) -> int:
    """Return how many bytes `num_bytes` take in a file: the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class SwapFile:
    """`SwapFile` creates a file that grows by each allocated region.

    Args:
        path: path in a `SwapFolder`.

    Raises:
        OSError: if the file cannot be created; with its path and errno.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # allocated
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._inode = os.fstat(fd).st_ino
        os.close(fd)

    def allocate(self, num_bytes: int) -> Region:
        """Return a region with space on the disk; its contents are zero.

        Raises:
            OSError: if the disk is full or the file is gone; says what to do.
        """
        region = Region(self, self.num_bytes, num_bytes)
        taken = padded(num_bytes)
        self.check("allocation", region.offset, num_bytes)
        if taken:
            try:
                _allocate(self.path, region.offset, taken)
            except OSError as error:
                what = _text("allocation", taken, region.offset)
                raise swap_error(error, self.path, what) from error
        self.num_bytes += taken
        return region

    def check(self, action: str, offset: int, num_bytes: int) -> None:
        """Raise OSError unless the file is the original one with all its bytes."""
        try:
            found = os.stat(self.path)
            if found.st_ino != self._inode:
                raise OSError(errno.ESTALE, "another file has taken its place")
            if found.st_size < self.num_bytes:
                raise OSError(
                    errno.ENODATA, f"the file was cut off: {found.st_size} of {self.num_bytes} bytes are left"
                )
        except OSError as error:
            raise swap_error(error, self.path, _text(action, num_bytes, offset)) from error


def _allocate(path: Path, offset: int, num_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    finally:
        os.close(fd)


def mapped_zeros(folder: Path, numel: int, dtype: torch.dtype) -> Tensor:
    """Return [numel] zeros in an unnamed file that is mapped into memory; the system can reclaim this memory.

    Raises:
        OSError: if the disk is full or the folder is gone; says what to do.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    path = folder / f"{uuid4().hex}.mapped"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            _allocate(path, 0, num_bytes)  # otherwise a write to the mapping on a full disk would kill the process
            return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)
        finally:
            os.unlink(path)
    except OSError as error:
        raise swap_error(error, path, _text("allocation", num_bytes, 0)) from error


_LOST = (
    "what was swapped out is lost, the weights in memory are not; check the disk of nvme_path, start again and load "
    "the last checkpoint"
)
_ADVICE = {
    errno.ENOSPC: "free space on that disk, or name a folder on a larger one as nvme_path",
    errno.EDQUOT: "ask for a larger quota, or name another folder as nvme_path",
}


def swap_error(error: OSError, path: str | Path, what: str = "") -> OSError:
    """Return the OSError of one operation on a swap file, of the class of its errno, with file and advice.

    Args:
        what: operation, length and offset, if the text of `error` does not contain them.
    """
    code = error.errno or errno.EIO
    text = ": ".join(filter(None, (error.strerror or os.strerror(code), what)))
    advice = _ADVICE.get(code, _LOST)
    return OSError(code, f"swap file: {text} ({errno.errorcode.get(code, code)}); {advice}", str(path))


def _text(action: str, num_bytes: int, offset: int) -> str:
    return f"{action} of {num_bytes} bytes at offset {offset}"


class SwapWork:
    """`SwapWork` is a read or a write in flight. A `Work` (`comm/backend.py`)."""

    __slots__ = ("_error", "_queue", "is_done")

    def __init__(self, queue: "SwapQueue") -> None:
        self._queue = queue
        self._error: OSError | None = None
        self.is_done = False

    def poll(self) -> bool:
        """Return whether `wait` was called for this operation or a later one of its queue."""
        return self.is_done

    def wait(self) -> None:
        """Return when this operation and all others in flight in its queue are done.

        Raises:
            OSError: if one of them failed; with file, offset, length, errno and what to do. Each of them raises it.
        """
        if not self.is_done:
            self._queue.finish()
        assert self.is_done
        if self._error is not None:
            raise self._error

    wait_on_host = wait  # for `Waitable`

    def end(self, error: OSError | None) -> None:
        """Set the result; called by the queue."""
        self.is_done, self._error = True, error


class SwapQueue:
    """`SwapQueue` holds reads and writes that are waited for together; use one queue per set to wait for.

    Args:
        aio: the user's block size, queue depth and workers.
    """

    def __init__(self, aio: AioConfig | None = None) -> None:
        aio = aio or AioConfig()
        self._handle = aio_handle(
            aio.block_size,
            aio.queue_depth,
            aio.single_submit,
            aio.overlap_events,
            max(aio.intra_op_parallelism, aio.thread_count),
        )
        self._works: list[SwapWork] = []

    def read(self, region: Region, tensor: Tensor, start: int = 0) -> SwapWork:
        """Start to fill `tensor`, contiguous and in host memory, from byte `start` of `region`."""
        return self._begin("read", region, tensor, start)

    def write(self, region: Region, tensor: Tensor, start: int = 0) -> SwapWork:
        """Start to write `tensor`, contiguous and in host memory, to byte `start` of `region`."""
        return self._begin("write", region, tensor, start)

    def finish(self) -> None:
        """Wait for all operations in flight. Errors are raised by the `SwapWork`s."""
        if not self._works:
            return
        error: OSError | None = None
        try:
            self._handle.wait()  # if interrupted, all operations are still in flight and can be waited for again
        except OSError as found:
            error = swap_error(found, str(found.filename))
        works, self._works = self._works, []
        for work in works:
            work.end(error)

    def _begin(self, action: str, region: Region, tensor: Tensor, start: int) -> SwapWork:
        assert 0 <= start <= region.num_bytes - tensor.nbytes, (start, tensor.nbytes, region.num_bytes)
        offset, path = region.offset + start, region.file.path
        region.file.check(action, offset, tensor.nbytes)
        work = SwapWork(self)
        if tensor.numel() == 0:
            work.end(None)
            return work
        begin = self._handle.async_pread if action == "read" else self._handle.async_pwrite
        try:
            begin(tensor, str(path), offset)
        except OSError as error:
            raise swap_error(error, path) from error
        self._works.append(work)
        return work
