"""`BackgroundWriter`: this rank's side of asynchronous saving. It copies states to shared memory, and sends orders to
the writer process (`writer.py`), which writes the states to disk.

The first save starts the process, without forking this one: devices and threads stay here. The shared memory
(`SharedMemory`) has no name and no file; it grows to the largest save, and the next save uses it again.

`Orders` is this rank's end of the pipes to the process.
"""

import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.checkpoint.stores import with_placeholders, write_state
from deepspeed.checkpoint.writer import Ending
from deepspeed.errors import CheckpointError, first_line
from deepspeed.log import announce, logger
from deepspeed.zero.redistribute import PendingTensor

_FIRST_BYTES = 64 * 2**20
_MIN_TAKEN_BYTES = 16 * 2**20  # allocated at a time, up to the end of the mapping


class SharedMemory:
    """`SharedMemory` is a file for `torch.save` over a mapping; writing to pages used before is a plain copy.

    Memory is allocated when it is written to, and stays for the next save. If the system refuses it, `write` raises
    OSError: a full temporary folder, or strict accounting of memory (vm.overcommit_memory=2). A process that exceeds
    the memory limit of its container or machine is killed all the same.
    """

    def __init__(self) -> None:
        self.position = 0
        self._taken_bytes = 0
        self._descriptor = _anonymous_file()
        self._pending: dict[tuple[int, int], PendingTensor] = {}  # by address and bytes of its placeholder
        self._places: list[tuple[int, int, PendingTensor]] = []  # first byte, end, and tensor still to copy there
        self._map(_FIRST_BYTES)

    def fileno(self) -> int:
        return self._descriptor

    def begin(self) -> None:
        """Write from the first byte again, over an earlier save; drop the tensors that it did not copy."""
        self.position = 0
        self._places.clear()

    def write_state(self, state: Any) -> None:
        """Write what `torch.save` writes for `state`. Held `PendingTensor`s are left out until `copy_pending` copies
        them."""
        try:
            write_state(with_placeholders(state, self._placeholder), self)
            assert not self._pending, "torch.save has written other memory than that of its tensors"
        finally:
            self._pending.clear()

    def copy_pending(self) -> None:
        """Copy the tensors that `write_state` has left out."""
        try:
            for first, end, tensor in self._places:
                tensor.copy_to(self._mapped[first:end])
        finally:
            self._places.clear()

    def write(self, data: bytes | memoryview) -> int:
        source = np.frombuffer(data, np.uint8)  # numpy copies, so that other threads run meanwhile
        first, end = self.position, self.position + source.nbytes
        if end > self._mapped.nbytes:
            self._map(2 * end)
        if end > self._taken_bytes:
            self._take(end)
        pending = self._pending.pop((source.ctypes.data, source.nbytes), None) if self._pending else None
        if pending is None:
            self._mapped[first:end] = source
        elif pending.is_held:
            self._places.append((first, end, pending))
        else:
            pending.copy_to(self._mapped[first:end])
        self.position = end
        return source.nbytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)

    def _placeholder(self, pending: PendingTensor) -> Tensor:
        """Return a tensor that stands for `pending` in `torch.save`; its memory is never touched."""
        tensor = torch.empty(pending.shape, dtype=pending.dtype)
        if tensor.numel():
            self._pending[tensor.data_ptr(), tensor.nbytes] = pending
        return tensor

    def _map(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        self._mapped = np.frombuffer(mmap.mmap(self._descriptor, num_bytes), np.uint8)

    def _take(self, end: int) -> None:
        """Allocate memory up to `end`: a write to a page that the system cannot provide would kill the process."""
        end = min(max(end, self._taken_bytes + _MIN_TAKEN_BYTES), self._mapped.nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, self._taken_bytes, end - self._taken_bytes)
        self._taken_bytes = end


def _anonymous_file() -> int:
    """Open a file without a name in memory, or in the temporary folder if the system has no such files; return its
    descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("deepspeed-staged-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Orders:
    """`Orders` numbers its orders, and an answer repeats the number of its order. So an answer that nobody waits for
    any more, because Ctrl-C ended the wait, is not taken for the answer to a later order.

    Args:
        process: the writer process, with binary pipes as stdin and stdout.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._number = 0  # of the last order
        self._read: list[bytes] = []  # data from the pipe; an empty item: the pipe has ended

    def send(self, order: Mapping[str, Any]) -> int:
        """Send an order and return its number. Answers to earlier orders are dropped. If the process has ended,
        `receive` returns None."""
        assert self._process.stdin is not None
        self._number += 1
        self._read = list(filter(None, [b"".join(self._read).rpartition(b"\n")[2]]))
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({**order, "number": self._number}).encode() + b"\n")
            self._process.stdin.flush()
        return self._number

    def receive(self, number: int) -> dict[str, Any] | None:
        """Wait for the answer to an order and return it; None if the process ended without one. May be called again."""
        while self._answer(number) is None and not self._has_ended():
            self._poll(None)
        if (answer := self._answer(number)) is None:
            self._process.wait()  # it has closed the pipe, and changes nothing on disk any more
        return answer

    def has_answer(self, number: int, within_s: float = 0) -> bool:
        """Whether `receive` will not wait. Wait up to `within_s` for each part of an answer."""
        while self._answer(number) is None and not self._has_ended():
            if not self._poll(int(within_s * 1000)):
                return False
        return True

    def error_of_end(self, reason: str = "") -> str:
        """Return the message about a process that ended without an answer; `reason` is the outcome of the order."""
        why = reason and f": {reason.rstrip('.')}"
        return (
            f"the writer process of this rank has ended with exit code {self._process.wait()}{why}. What it printed is "
            "above; the next save starts another one."
        )

    def _answer(self, number: int) -> dict[str, Any] | None:
        """Return the answer, if it was read from the pipe."""
        for line in b"".join(self._read).splitlines(keepends=True):
            if line.endswith(b"\n") and (answer := json.loads(line))["number"] == number:
                return dict(answer)
        return None

    def _has_ended(self) -> bool:
        return bool(self._read) and not self._read[-1]

    def _poll(self, timeout_ms: int | None) -> bool:
        """Wait for the pipe and read some of it; return False if nothing came in time."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()  # not select, which takes no descriptors above 1023
        poll.register(pipe, select.POLLIN)
        if not poll.poll(timeout_ms):
            return False
        self._read.extend(map(os.read, [pipe], [2**16]))  # one call: an interrupt cannot lose what was read
        return True


_BRIEF_S = 0.5  # a shorter wait is not announced
_START = "import sys; sys.path[:] = sys.argv[1:-2]; from deepspeed.checkpoint.writer import main; main()"


class BackgroundWriter:
    """`BackgroundWriter` is created once per engine and rank.

    Args:
        limit_s: how long the writers wait for the silent writer of another rank.
        persistent: arguments of `writer.Persistence`, for the committing rank; None: there is no farther tier.
    """

    def __init__(self, limit_s: float = 300.0, persistent: Mapping[str, Any] | None = None) -> None:
        self._limit_s = limit_s
        self._persistent = persistent
        self._commits = False  # whether this process has ordered a commit
        self._process: _Process | None = None

    def create(self, folder: Path) -> None:
        """Create an empty staging folder that the writer process claims: the committing rank's first step."""
        self._started().ask({"do": "create", "folder": str(folder.absolute())})

    def stage(self, folder: Path, name: str, files: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Copy the states to save; when it returns, training may go on and change all but held `PendingTensor`s.

        Args:
            name: name of this rank's report, see `writer.Report`.
            files: name -> state.

        Returns the order to write them, for `write`.
        """
        process = self._started()
        process.ask({"do": "join", "folder": str(folder.absolute()), "name": name})
        try:
            return _copy(files, process.memory)
        except (OSError, RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"cannot save {folder}: no shared memory for a copy of this rank's states: {error}. Asynchronous "
                "saving needs as much host memory as the rank's files have bytes; set checkpoint.async_save to false."
            ) from error

    def write(
        self,
        staged: list[dict[str, Any]],
        commit: Mapping[str, Any] | None,
        *,
        folder: Path,
        name: str,
        began: str,
        save_latest: bool,
    ) -> None:
        """Start to copy the pending tensors and to write what was staged, and return.

        Args:
            commit: on the committing rank, the arguments of `Writer._commit`; else None.
            folder, name: as for `stage`.
            began, save_latest: as in `writer.Ending`.
        """
        assert self._process is not None, "write before stage"
        ending = Ending(str(folder.absolute()), name, began, save_latest, self._limit_s)
        if commit is not None and self._persistent is not None:
            commit, self._commits = {**commit, "persistent": self._persistent}, True
        order = {"do": "write", "files": staged, "commit": commit, "ending": ending.as_message()}
        self._process.begin(order, f"save of {folder}", ending)

    def cancel(self) -> None:
        """Drop what was staged, after a failure on any rank between `create` and `write`.

        Files that cannot be removed are left to the next save.
        """
        if self._process is not None:
            self._process.memory.begin()
            with contextlib.suppress(CheckpointError):  # the failure that led here is the one to raise
                self._process.ask({"do": "cancel"})

    def kill(self) -> None:
        """Kill the writer process, after an interrupt between `create` and `write`, without waiting for other ranks."""
        if self._process is not None:
            self._process.kill()

    def wait_for_copy(self) -> None:
        """Return when the values of `PendingTensor`s may change. `finish` raises if their copy has failed."""
        if self._process is not None:
            self._process.wait_for_copy()

    def finish(self) -> None:
        """Wait for the save in flight, if any.

        Raises:
            CheckpointError: the save has failed; `latest` names the former checkpoint.
        """
        if self._process is not None:
            self._process.finish()

    def raise_failure(self) -> None:
        """Raise if the save in flight has failed; do not wait."""
        if self._process is not None and self._process.has_answer():
            self._process.finish()

    def close(self) -> None:
        """Wait for the save in flight, and for its copy to a farther tier, and end the process.

        Raises:
            CheckpointError: as for `finish`; or the newest tag cannot be copied.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.finish()
            if self._commits and self._persistent is not None and process.is_alive():
                process.persist(self._persistent["directory"])
        finally:
            process.end()

    def _started(self) -> "_Process":
        if self._process is None or not self._process.is_alive():
            self._process = _Process(self._limit_s)
        return self._process


@dataclass(frozen=True)
class _InFlight:
    """`_InFlight` is a save that was ordered."""

    number: "Future[int]"  # known when the pending tensors are copied and the order is sent
    what: str  # completes "the asynchronous ... has failed"
    ending: Ending  # finds the outcome if the process ends without an answer


class _Process:
    """The writer process and the memory that it shares. When this object is collected, and when the program exits, the
    save in flight is waited for.

    A thread copies the pending tensors and sends the order to save; nobody else uses the pipes until it is done."""

    def __init__(self, limit_s: float) -> None:
        self.memory = SharedMemory()
        descriptor = self.memory.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path, str(descriptor), str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        self._orders = Orders(self._process)
        self._in_flight: list[_InFlight] = []  # one, or nothing
        self._copier = ThreadPoolExecutor(1, "ds-copy")  # completes its work when the program ends
        parts = (self._process, self._orders, self.memory, self._in_flight, os.getpid())
        self.end: Callable[[], None] = weakref.finalize(self, _end, *parts)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._in_flight.clear()

    def ask(self, order: Mapping[str, Any]) -> None:
        """Send an order and wait for the answer; raise `CheckpointError` if the order failed."""
        assert not self._in_flight, "an order before the save in flight was waited for"
        self._wait_for(self._orders.send(order))

    def persist(self, directory: str) -> None:
        """Wait until the newest tag is in the farther tier `directory`; raise `CheckpointError` if it cannot be."""
        number = self._orders.send({"do": "persist"})
        if not self._orders.has_answer(number, _BRIEF_S):
            announce(f"waiting for the copy of the last checkpoint to {directory}")
        self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        answer = self._orders.receive(number)
        if answer is None:
            raise CheckpointError(self._orders.error_of_end())
        if "error" in answer:
            raise CheckpointError(answer["error"])

    def begin(self, order: Mapping[str, Any], what: str, ending: Ending) -> None:
        """Send an order after the pending tensors are copied. `finish` reads the answer."""
        number = self._copier.submit(_copy_and_send, self.memory, self._orders, order)
        self._in_flight.append(_InFlight(number, what, ending))

    def wait_for_copy(self) -> None:
        """See `BackgroundWriter.wait_for_copy`."""
        wait([each.number for each in self._in_flight])

    def has_answer(self) -> bool:
        """Whether `finish` will not wait."""
        return all(_has_answer(each, self._orders) for each in self._in_flight)

    def finish(self) -> None:
        """See `BackgroundWriter.finish`."""
        if not self._in_flight:
            return
        save = self._in_flight[0]
        if not _has_answer(save, self._orders, _BRIEF_S):
            announce(f"waiting for the asynchronous {save.what}")
        failure = _failure_of(save, self._orders)
        self._in_flight.clear()  # not before: an interrupt of the wait leaves it in flight
        if failure is not None:
            raise failure


def _copy_and_send(memory: SharedMemory, orders: Orders, order: Mapping[str, Any]) -> int:
    """Copy the pending tensors, send `order`, and return its number, in a thread. A failed copy cancels the save."""
    try:
        memory.copy_pending()
    except BaseException:
        orders.send({"do": "cancel"})
        raise
    return orders.send(order)


def _has_answer(save: _InFlight, orders: Orders, within_s: float = 0) -> bool:
    """Whether `_failure_of` will not wait. Wait up to `within_s` for each of its two steps."""
    if not wait([save.number], within_s).done:
        return False
    if save.number.exception() is not None:
        return True
    number = save.number.result()
    return orders.has_answer(number, within_s) and (
        orders.receive(number) is not None or save.ending.look_without_writer() is not None
    )


def _failure_of(save: _InFlight, orders: Orders) -> CheckpointError | None:
    """Wait until the save has ended, and return the error to raise for it; None if the save is complete."""
    wait([save.number])
    if (error := save.number.exception()) is not None:
        return CheckpointError(
            f"the asynchronous {save.what} has failed: cannot copy this rank's states: {first_line(error)}"
        )
    answer = orders.receive(save.number.result())
    result = save.ending.wait_without_writer() if answer is None else answer
    if "error" not in result:
        return None
    reason = result["error"] if answer is not None else orders.error_of_end(result["error"])
    verb = "has failed" if result.get("is_known", True) else "may have failed"
    return CheckpointError(f"the asynchronous {save.what} {verb}: {reason}")


def _end(
    process: "subprocess.Popen[bytes]",
    orders: Orders,
    memory: SharedMemory,
    in_flight: list[_InFlight],
    owner: int,
) -> None:
    """Let the writer process complete its order and end."""
    if os.getpid() != owner:
        return  # a fork of the process that started it
    if in_flight and process.poll() is None:
        announce(f"waiting for the asynchronous {in_flight[0].what} before the program ends")
    wait([save.number for save in in_flight])
    assert process.stdin is not None
    assert process.stdout is not None
    for save in in_flight:
        if (failure := _failure_of(save, orders)) is not None:
            logger.error("%s", failure)
    in_flight.clear()
    orders.send({"do": "end"})  # a fork of this process may hold the pipe open
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()
    memory.close()


def _copy(files: Mapping[str, Any], memory: SharedMemory) -> list[dict[str, Any]]:
    """Write each state into `memory`, over an earlier save; return name, offset and bytes of each."""
    staged = []
    memory.begin()
    for name, state in files.items():
        offset = memory.position
        memory.write_state(state)
        staged.append({"name": name, "offset": offset, "bytes": memory.position - offset})
        memory.position = -(-memory.position // mmap.PAGESIZE) * mmap.PAGESIZE
    return staged
