"""`aio_handle`: reads and writes between tensors and files, with DeepSpeed's methods.

One handle has its own workers; they start when the handle is first used. Methods may be called from several threads.
Read next: `files.py`, and `csrc/aio/engine.cpp` for what a worker does.
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
_MAX_FILES = 128  # operations that have files open, two each
_LOOK_AGAIN_S = 0.2  # how long Ctrl-C may wait


class _Running(NamedTuple):
    """An operation that was submitted."""

    operation: Any
    buffer: torch.Tensor
    path: str
    write: bool
    offset: int
    validate: bool


class AsyncIOHandle:
    """Reads and writes files from and into host tensors, in blocks that are in flight at the same time.

    Args:
        block_size: bytes of one request; up to 1 GiB.
        queue_depth: requests in flight per worker; up to 4096.
        single_submit: submit requests one by one instead of in batches.
        overlap_events: a finished request makes room for the next one at once; otherwise a batch of `queue_depth`
            requests is finished before the next batch.
        intra_op_parallelism: workers, which share the requests of each operation. Where threads are the engine, up to
            64 of `intra_op_parallelism * queue_depth` requests are carried out at the same time.

    Tensors are contiguous and in host memory, of any dtype. Offsets are in bytes and need no alignment; it is fastest
    where `file_offset` and the tensor's address are multiples of 4096, since O_DIRECT then moves the bytes without a
    copy. A write keeps the bytes beside its range, and a file grows to the end of the range. Nothing is synced.

    Every method that cannot do what it is asked raises: ValueError or TypeError for a tensor or a range, OSError with
    errno, file, offset and length for a file. Operations in flight at the same time have no order.
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
        self._running: list[_Running] = []  # asynchronous ones, until `wait`
        self._held: dict[Any, torch.Tensor] = {}  # operation -> tensor, of those that may be in flight
        self._engine: Any = None
        self._engine_name = ""
        self._stop: Any = None
        self._is_closed = False
        self._locked = LockedTensors()

    # ----- operations ------------------------------------------------------------------------------------------------

    def read(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer` from `filename`, by one worker. Returns 1, the number of finished operations."""
        return self._run(self._submit(buffer, filename, file_offset, write=False, one_worker=True))

    def write(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer` to `filename`, by one worker. Returns 1."""
        return self._run(self._submit(buffer, filename, file_offset, write=True, one_worker=True))

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from `filename`, by all workers.

        Args:
            buffer: is filled.
            filename: of a regular file.
            validate: compare with what plain file I/O reads, when it is done.
            async_: return at once; `wait` finishes it.
            file_offset: in bytes.

        Returns:
            1 when it is done; 0 when it is in flight.
        """
        return self._parallel(buffer, filename, file_offset, False, validate, async_)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Write `buffer` to `filename`, by all workers; arguments and result as those of `pread`."""
        return self._parallel(buffer, filename, file_offset, True, validate, async_)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer` from `filename`, by all workers. Returns 1."""
        return self._parallel(buffer, filename, file_offset, False, False, False)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write `buffer` to `filename`, by all workers. Returns 1."""
        return self._parallel(buffer, filename, file_offset, True, False, False)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to fill `buffer` from `filename`. Returns 0; `wait` finishes it."""
        return self._parallel(buffer, filename, file_offset, False, False, True)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to write `buffer` to `filename`. Returns 0; `wait` finishes it."""
        return self._parallel(buffer, filename, file_offset, True, False, True)

    def wait(self) -> int:
        """Finish the asynchronous operations that were begun before. Returns their number.

        Raises:
            OSError: of the first operation that failed, after all have ended; the message has the number of the others
                that failed. The handle can be used again.
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
        except BaseException:  # Ctrl-C: what was not waited for stays in flight
            with self._lock:
                self._running[:0] = running[count:]
            raise
        if errors:
            raise _with_count(errors, len(running))
        return count

    def close(self) -> None:
        """Finish what is in flight and end the workers; any other call then raises. DeepSpeed has no such method.

        The same happens when the handle is garbage, and at the end of the process.
        """
        self._check_usable()
        with self._lock:
            self._is_closed, stop = True, self._stop
        if stop is not None:
            stop()

    # ----- memory ----------------------------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose memory is aligned to pages and locked, that is, never swapped out.

        Where the limit of locked memory does not permit it, the memory is only aligned, and a warning says so once.

        Args:
            num_elem: its number of elements.
            example_tensor: has its dtype.

        Returns:
            An uninitialized tensor of shape (num_elem,).
        """
        if operator.index(num_elem) < 0:
            raise ValueError(f"num_elem is {num_elem}; it must be 0 or more")
        return self._locked.new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock a tensor of `new_cpu_locked_tensor`; its memory is freed with the last reference to it.

        Returns:
            False for a tensor that this handle did not make, or that is already free.
        """
        return self._locked.free(tensor)

    # ----- questions -------------------------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Bytes of one request."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Requests in flight per worker."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Whether requests are submitted one by one."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Whether a finished request makes room for the next one at once."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Workers."""
        return self._intra_op_parallelism

    def get_engine(self) -> str:
        """What moves the bytes, "io_uring" or "threads". DeepSpeed has no such question."""
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
        except RuntimeError:  # closed by another thread
            opened.close()
            raise
        return _Running(operation, buffer, path, write, offset, bool(validate))

    def _await_room(self, engine: Any) -> None:
        """Wait until few enough operations have files open: others need descriptors as well."""
        while len(self._held) >= _MAX_FILES:
            for oldest in list(self._held)[:1]:  # none, if other threads finished all
                if self._io.wait(engine, oldest, _LOOK_AGAIN_S) is not None:
                    self._held.pop(oldest, None)

    def _run(self, running: _Running) -> int:
        """Wait for one operation, and for no other."""
        error = self._finish(running)
        if error is not None:
            raise error
        return 1

    def _finish(self, running: _Running) -> Exception | None:
        while (ended := self._io.wait(self._engine, running.operation, _LOOK_AGAIN_S)) is None:
            pass  # signals are handled in between
        self._held.pop(running.operation, None)
        code, offset, length = ended
        if code:
            return describe(code, running.path, running.write, offset, length)
        return check_equal(running.buffer, running.path, running.offset) if running.validate else None

    def _started(self) -> Any:
        """The engine, which is started when it is first asked for."""
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
    """The class `aio_handle` over the compiled module `io`."""
    return type("aio_handle", (AsyncIOHandle,), {"_io": io, "__doc__": AsyncIOHandle.__doc__})


def _stop(io: Any, engine: Any, held: dict[Any, torch.Tensor], pid: int) -> None:
    """Finish what is in flight, whose tensors `held` holds until then. A child has no workers to stop."""
    if os.getpid() == pid:
        io.stop(engine)
        held.clear()


def _checked(name: str, value: int, largest: int) -> int:
    value = operator.index(value)
    if not 1 <= value <= largest:
        raise ValueError(f"{name} is {value}; it must be from 1 to {largest}")
    return value


def _check_buffer(buffer: torch.Tensor) -> None:
    """Refuse what has no plain bytes in host memory."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"buffer is a {type(buffer).__name__}; it must be a tensor")
    if buffer.device.type != "cpu":
        raise ValueError(f"buffer is on {buffer.device}; it must be in host memory: copy it there first")
    if buffer.layout != torch.strided or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        kind = f"shape {tuple(buffer.shape)} and layout {buffer.layout}"
        raise ValueError(f"buffer, of {kind}, is not contiguous; give buffer.contiguous()")


def _with_count(errors: list[Exception], num_operations: int) -> Exception:
    """The first of `errors`, with how many of the operations failed."""
    first = errors[0]
    if len(errors) == 1 or not isinstance(first, OSError):
        return first
    others = f"; {len(errors) - 1} more of {num_operations} operations failed"
    return OSError(first.errno, f"{first.strerror}{others}", first.filename)
