"""Swap files: preallocated space on a disk for tensors, and asynchronous reads and writes of it.

    folder = SwapFolder(nvme_path, rank=rank)
    file = SwapFile(folder.path / "optimizer.swap")
    region = file.allocate(tensor.nbytes)                    # space on the disk, or an error: before training starts
    reads, writes = SwapQueue(aio), SwapQueue(aio)           # `aio`: the section of the configuration
    writes.write(region, tensor).wait()                      # `tensor` must not change until then
    reads.read(region, tensor).wait()                        # `tensor` must not be read until then

Operations in flight have no order: wait for a write before its range is read, and the other way around. A file that
was removed, replaced or cut off is an error when it is next used, and is never made again in silence, with holes.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from deepspeed.config.training import AioConfig
from deepspeed.ops.aio import aio_handle
from deepspeed.zero.offload.buffers import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Region:
    """`num_bytes` of a swap file, from `offset` on, which is a multiple of `ALIGNMENT`.

    Tensors whose address is one too (`HostMemory.aligned`) are moved without a copy.
    """

    file: "SwapFile"
    offset: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.num_bytes

    def part(self, start: int, num_bytes: int) -> "Region":
        """`num_bytes` from byte `start` of it on, which is a multiple of `ALIGNMENT` too."""
        assert start % ALIGNMENT == 0, start
        assert start + num_bytes <= self.num_bytes, (start, num_bytes, self.num_bytes)
        return Region(self.file, self.offset + start, num_bytes)


def padded(num_bytes: int) -> int:
    """Return how many bytes of a file `num_bytes` bytes take: the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class SwapFile:
    """A new file, which grows by the regions that are given out.

    Args:
        path: in a `SwapFolder`.

    Raises:
        OSError: it cannot be made; with its path and errno.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # given out
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._inode = os.fstat(fd).st_ino
        os.close(fd)

    def allocate(self, num_bytes: int) -> Region:
        """A region with space on the disk; its contents are zero.

        Raises:
            OSError: the disk is full, or the file is gone; says what to do.
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
        """Raise OSError unless the file is the one that was made, with all its bytes."""
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
    """[numel] zeros that are a file, without a name, mapped into memory: the system can take their memory back.

    Raises:
        OSError: the disk is full, or the folder is gone; says what to do.
    """
    num_bytes = numel * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(0, dtype=dtype)
    path = folder / f"{uuid4().hex}.mapped"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            _allocate(path, 0, num_bytes)  # else a write to the mapping of a full disk would kill the process
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
    """The error of one operation on a swap file: an OSError of the class of its errno, with file and advice.

    Args:
        what: operation, length and offset, where the text of `error` does not have them.
    """
    code = error.errno or errno.EIO
    text = ": ".join(filter(None, (error.strerror or os.strerror(code), what)))
    advice = _ADVICE.get(code, _LOST)
    return OSError(code, f"swap file: {text} ({errno.errorcode.get(code, code)}); {advice}", str(path))


def _text(action: str, num_bytes: int, offset: int) -> str:
    return f"{action} of {num_bytes} bytes at offset {offset}"


class SwapWork:
    """A read or a write in flight. A `Work` (`comm/backend.py`)."""

    __slots__ = ("_error", "_queue", "is_done")

    def __init__(self, queue: "SwapQueue") -> None:
        self._queue = queue
        self._error: OSError | None = None
        self.is_done = False

    def poll(self) -> bool:
        """Whether `wait` was called, for this operation or for a later one of its queue."""
        return self.is_done

    def wait(self) -> None:
        """Return when the operation, and all that its queue has in flight, is done.

        Raises:
            OSError: one of them failed; with file, offset, length, errno and what to do. Each of them raises it.
        """
        if not self.is_done:
            self._queue.finish()
        assert self.is_done
        if self._error is not None:
            raise self._error

    wait_on_host = wait  # as a `Mark` has it

    def end(self, error: OSError | None) -> None:
        """Called by the queue."""
        self.is_done, self._error = True, error


class SwapQueue:
    """Reads and writes that are waited for together; use one queue for what is waited for apart.

    Args:
        aio: block size, queue depth and workers, as the user chose them.
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
        """Begin to fill `tensor`, contiguous and in host memory, from byte `start` of `region` on."""
        return self._begin("read", region, tensor, start)

    def write(self, region: Region, tensor: Tensor, start: int = 0) -> SwapWork:
        """Begin to write `tensor`, contiguous and in host memory, from byte `start` of `region` on."""
        return self._begin("write", region, tensor, start)

    def finish(self) -> None:
        """Wait for all that is in flight. Errors are for the `SwapWork`s to raise."""
        if not self._works:
            return
        error: OSError | None = None
        try:
            self._handle.wait()  # after an interrupt in it all are in flight still, and may be waited for again
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
