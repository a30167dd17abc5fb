"""`aio_handle` reads and writes between tensors and files, with DeepSpeed's methods.

Each handle has its own workers. They start when the handle is first used. Methods may be called from several threads.
Read next: `files.py`, and `csrc/aio/engine.cpp` for the workers.
"""

import logging
import operator
import os
import threading
import weakref
from typing import Any, NamedTuple

import torch
from deepspeed.errors import counted
from deepspeed.log import logger

from ds_ext_cpu.aio import probing
from ds_ext_cpu.aio.files import describe, open_file
from ds_ext_cpu.aio.locked_memory import LockedTensors
from ds_ext_cpu.aio.validation import check_equal

_MAX_BLOCK_BYTES = 1 << 30
_MAX_DEPTH = 4096
_MAX_THREADS = 64
_MAX_FILES = 128  # operations with open files; each has up to two descriptors
_LOOK_AGAIN_S = 0.2  # longest delay of Ctrl-C during a wait


class _Running(NamedTuple):
    """An operation that was submitted."""

    operation: Any
    buffer: torch.Tensor
    path: str
    write: bool
    offset: int
    validate: bool


class AsyncIOHandle:
    """Read files into host tensors and write host tensors to files, with several blocks in flight at the same time.

    Args:
        block_size: bytes per request; up to 1 GiB.
        queue_depth: requests in flight per worker; up to 4096.
        single_submit: submit requests one by one instead of in batches.
        overlap_events: submit the next request as soon as one finishes; otherwise finish a batch of `queue_depth`
            requests before the next batch.
        intra_op_parallelism: number of workers, which share the requests of each operation. The engine "threads"
            processes `intra_op_parallelism * queue_depth` requests at the same time, but at most 64.

    Tensors are contiguous, in host memory, and of any dtype. Offsets are in bytes and need no alignment. I/O is fastest
    if `file_offset` and the tensor's address are multiples of 4096: O_DIRECT then moves the bytes without a copy. A
    write leaves the bytes outside its range unchanged, and extends the file to the end of the range. Nothing is synced.

    Every method raises on failure: ValueError or TypeError for a tensor or a range, OSError with errno, file, offset
    and length for a file. Operations in flight at the same time have no order.
    """

    _io: Any  # the compiled module

    def __init__(
        self,
        block_size: int = 1_048_576,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = _checked("block_size", block_size, _MAX_BLOCK_BYTES)
        self._queue_depth = _checked("queue_depth", queue_depth, _MAX_DEPTH)
        self._intra_op_parallelism = _checked("intra_op_parallelism", intra_op_parallelism, _MAX_THREADS)
        self._single_submit, self._overlap_events = bool(single_submit), bool(overlap_events)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._running: list[_Running] = []  # asynchronous operations, until `wait`
        self._held: dict[Any, torch.Tensor] = {}  # operation -> tensor, while the operation may be in flight
        self._engine: Any = None
        self._engine_name = ""
        self._stop: Any = None
        self._is_closed = False
        self._locked = LockedTensors()

    # ----- operations ------------------------------------------------------------------------------------------------

    def read(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer` from `filename` with one worker. Returns 1, the number of finished operations."""
        return self._run(self._submit(buffer, filename, file_offset, write=False, one_worker=True))

    def write(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer` to `filename` with one worker. Returns 1."""
        return self._run(self._submit(buffer, filename, file_offset, write=True, one_worker=True))

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from `filename` with all workers.

        Args:
            buffer: the tensor to fill.
            filename: path of a regular file.
            validate: after the operation, compare `buffer` with the result of plain file I/O.
            async_: return at once; `wait` finishes the operation.
            file_offset: in bytes.

        Returns:
            1 if the operation is done; 0 if it is in flight.
        """
        return self._parallel(buffer, filename, file_offset, False, validate, async_)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Write `buffer` to `filename` with all workers. Arguments and result: see `pread`."""
        return self._parallel(buffer, filename, file_offset, True, validate, async_)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer` from `filename` with all workers. Returns 1."""
        return self._parallel(buffer, filename, file_offset, False, False, False)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer` to `filename` with all workers. Returns 1."""
        return self._parallel(buffer, filename, file_offset, True, False, False)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to fill `buffer` from `filename`. Returns 0; `wait` finishes the operation."""
        return self._parallel(buffer, filename, file_offset, False, False, True)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to write `buffer` to `filename`. Returns 0; `wait` finishes the operation."""
        return self._parallel(buffer, filename, file_offset, True, False, True)

    def wait(self) -> int:
        """Finish the asynchronous operations that were started before. Returns their number.

        Raises:
            OSError: the error of the first operation that failed, after all operations have ended. The message says how
                many others failed. The handle remains usable.
        """
        self._check_usable()
        with self._lock:
            running = self._running[:]
            self._running.clear()
        count = 0
        errors: list[Exception] = []
        try:
            for one in running:
                error = self._finish(one)
                count += 1
                errors += [error] if error is not None else []
        except BaseException:  # Ctrl-C: the other operations stay in flight
            with self._lock:
                self._running[:0] = running[count:]
            raise
        if errors:
            raise _with_count(errors, len(running))
        return count

    def close(self) -> None:
        """Finish the operations in flight and stop the workers. Later operations raise. DeepSpeed has no such method.

        The same happens when the handle is garbage-collected, and at the end of the process.
        """
        self._check_usable()
        with self._lock:
            self._is_closed, stop = True, self._stop
        if stop is not None:
            stop()

    # ----- memory ----------------------------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Create a tensor in page-aligned, locked memory, which is never swapped out.

        If the memory cannot be locked (see `ulimit -l`), it is only aligned, and a warning says so once.

        Args:
            num_elem: number of elements of the new tensor.
            example_tensor: a tensor with the dtype of the new tensor.

        Returns:
            An uninitialized tensor of shape (num_elem,).
        """
        if operator.index(num_elem) < 0:
            raise ValueError(f"num_elem is {num_elem}; it must be 0 or more")
        return self._locked.new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock a tensor of `new_cpu_locked_tensor`. Its memory is freed with the last reference to the tensor.

        Returns:
            False for a tensor that this handle did not create, or that is already unlocked.
        """
        return self._locked.free(tensor)

    # ----- questions -------------------------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Return the bytes per request."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return the number of requests in flight per worker."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return whether requests are submitted one by one."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return whether the next request is submitted as soon as one finishes."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the number of workers."""
        return self._intra_op_parallelism

    def get_engine(self) -> str:
        """Return the engine, "io_uring" or "threads"; starts the engine if necessary. DeepSpeed has no such method."""
        self._started()
        return self._engine_name

    # ----- inside ----------------------------------------------------------------------------------------------------

    def _parallel(
        self, buffer: torch.Tensor, filename: str, offset: int, write: bool, validate: bool, in_background: bool
    ) -> int:
        running = self._submit(buffer, filename, offset, write, validate=validate)
        if not in_background:
            return self._run(running)
        with self._lock:
            self._running.append(running)
        return 0

    def _submit(
        self,
        buffer: torch.Tensor,
        filename: str,
        offset: int,
        write: bool,
        validate: bool = False,
        one_worker: bool = False,
    ) -> _Running:
        engine = self._started()
        _check_buffer(buffer)
        path, offset = os.fspath(filename), operator.index(offset)
        if offset < 0:
            raise ValueError(f"file_offset is {offset}; it must be 0 or more")
        length = buffer.numel() * buffer.element_size()
        self._await_room(engine)
        opened = open_file(self._io, path, write, offset, length)
        files, place = opened[:2], (buffer.data_ptr(), length, offset)
        try:
            operation = self._io.submit(engine, self._held, buffer, write, *files, *place, *opened[2:], one_worker)
        except RuntimeError:  # another thread closed the handle
            opened.close()
            raise
        return _Running(operation, buffer, path, write, offset, bool(validate))

    def _await_room(self, engine: Any) -> None:
        """Wait until fewer than `_MAX_FILES` operations have open files: the process needs descriptors elsewhere."""
        while len(self._held) >= _MAX_FILES:
            for oldest in list(self._held)[:1]:  # empty if other threads finished all operations
                if self._io.wait(engine, oldest, _LOOK_AGAIN_S) is not None:
                    self._held.pop(oldest, None)

    def _run(self, running: _Running) -> int:
        """Wait for one operation only."""
        error = self._finish(running)
        if error is not None:
            raise error
        return 1

    def _finish(self, running: _Running) -> Exception | None:
        while (ended := self._io.wait(self._engine, running.operation, _LOOK_AGAIN_S)) is None:
            pass  # signals are handled between two waits
        self._held.pop(running.operation, None)
        code, offset, length = ended
        if code:
            return describe(code, running.path, running.write, offset, length)
        return check_equal(running.buffer, running.path, running.offset) if running.validate else None

    def _started(self) -> Any:
        """Return the engine. The first call starts it."""
        self._check_usable()
        with self._lock:
            if self._engine is None:
                self._engine_name = probing.choose_engine()
                self._engine = self._start(self._engine_name)
                self._stop = weakref.finalize(self, _stop, self._io, self._engine, self._held, self._pid)
            return self._engine

    def _start(self, name: str) -> Any:
        workers = self._intra_op_parallelism
        if name == "threads":
            workers = min(workers * self._queue_depth, _MAX_THREADS)
        flags = (self._single_submit, self._overlap_events)
        try:
            return self._io.start(name == "io_uring", self._block_size, self._queue_depth, *flags, workers)
        except OSError as error:
            if name == "threads" or os.environ.get(probing.VARIABLE):
                raise OSError(
                    error.errno, f"{error.strerror}: starting {counted(workers, 'worker')} with {name}"
                ) from None
            logger.log(logging.WARNING, "async_io uses threads, as no ring can be made: %s", error.strerror)
            self._engine_name = "threads"
            return self._start("threads")

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this aio_handle was made in process {self._pid} and is used in its child {os.getpid()}, where it has "
                "no workers; make a handle in the child"
            )
        if self._is_closed or (self._stop is not None and not self._stop.alive):
            raise RuntimeError("this aio_handle is closed; make another one")


def make_handle_class(io: Any) -> type[AsyncIOHandle]:
    """Create the class `aio_handle` over the compiled module `io`."""
    return type("aio_handle", (AsyncIOHandle,), {"_io": io, "__doc__": AsyncIOHandle.__doc__})


def _stop(io: Any, engine: Any, held: dict[Any, torch.Tensor], pid: int) -> None:
    """Finish the operations in flight; `held` keeps their tensors until then. A forked child has no workers to stop."""
    if os.getpid() == pid:
        io.stop(engine)
        held.clear()


def _checked(name: str, value: int, largest: int) -> int:
    value = operator.index(value)
    if not 1 <= value <= largest:
        raise ValueError(f"{name} is {value}; it must be from 1 to {largest}")
    return value


def _check_buffer(buffer: torch.Tensor) -> None:
    """Refuse a buffer that is not a contiguous tensor in host memory."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"buffer is a {type(buffer).__name__}; it must be a tensor")
    if buffer.device.type != "cpu":
        raise ValueError(f"buffer is on {buffer.device}; it must be in host memory: copy it there first")
    if buffer.layout != torch.strided or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        kind = f"shape {tuple(buffer.shape)} and layout {buffer.layout}"
        raise ValueError(f"buffer, of {kind}, is not contiguous; give buffer.contiguous()")


def _with_count(errors: list[Exception], num_operations: int) -> Exception:
    """Return the first of `errors`, with the number of the other failed operations in its message."""
    first = errors[0]
    if len(errors) == 1 or not isinstance(first, OSError):
        return first
    others = f"; {len(errors) - 1} more of {num_operations} operations failed"
    return OSError(first.errno, f"{first.strerror}{others}", first.filename)
