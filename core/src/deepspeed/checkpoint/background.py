"""`BackgroundWriter`: this rank's side of asynchronous saving. It copies states to shared memory, and gives orders to
the writer process (`writer.py`) that puts them on disk.

The process is started once, by the first save, without a fork of this one: devices and threads stay here. The shared
memory has no name and no file, grows to the largest save, and is used again by the next one.
"""

import contextlib
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.orders import Orders
from deepspeed.checkpoint.shared_memory import SharedMemory
from deepspeed.checkpoint.torch_store import write_state
from deepspeed.errors import CheckpointError
from deepspeed.log import announce, logger

_START = "import sys; sys.path[:] = sys.argv[1:-2]; from deepspeed.checkpoint.writer import main; main()"


class BackgroundWriter:
    """Made once per engine and rank.

    Args:
        limit_s: how long the writers wait for the writer of another rank of which nothing is heard.
    """

    def __init__(self, limit_s: float = 300.0) -> None:
        self._limit_s = limit_s
        self._process: _Process | None = None

    def create(self, folder: Path) -> None:
        """The committing rank's first step: an empty staging folder, claimed by its writer process."""
        self._started().ask({"do": "create", "folder": str(folder.absolute())})

    def stage(self, folder: Path, name: str, files: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Copy what is to be saved; when it returns, training may go on and change it.

        Args:
            name: of this rank's report, see `reports.Report`.
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

    def write(self, staged: list[dict[str, Any]], commit: Mapping[str, Any] | None, what: str) -> None:
        """Begin to write what was staged, and return.

        Args:
            commit: on the committing rank the arguments of `Writer._commit`.
            what: completes "the asynchronous ... has failed".
        """
        assert self._process is not None, "write before stage"
        self._process.begin({"do": "write", "files": staged, "commit": commit}, what)

    def cancel(self) -> None:
        """After a failure on any rank between `create` and `write`. What cannot be removed is left to the next save."""
        if self._process is not None:
            with contextlib.suppress(CheckpointError):  # the failure that led here is the one to raise
                self._process.ask({"do": "cancel"})

    def kill(self) -> None:
        """After an interrupt in the same place, which is not to wait for other ranks."""
        if self._process is not None:
            self._process.kill()

    def finish(self) -> None:
        """Wait for the save in flight, if any.

        Raises:
            CheckpointError: it has failed; `latest` names the former checkpoint.
        """
        if self._process is not None:
            self._process.finish()

    def raise_failure(self) -> None:
        """Raise if the save in flight has failed; does not wait."""
        if self._process is not None and self._process.has_answer():
            self._process.finish()

    def close(self) -> None:
        """Wait for the save in flight, and end the process.

        Raises:
            CheckpointError: as `finish`.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.finish()
        finally:
            process.end()

    def _started(self) -> "_Process":
        if self._process is None or not self._process.is_alive():
            self._process = _Process(self._limit_s)
        return self._process


class _Process:
    """The writer process and the memory that it shares. When this object goes, and at the exit of the program, the save
    in flight is waited for."""

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
        self._in_flight: list[tuple[int, str]] = []  # the order to save and what it saves, or nothing
        parts = (self._process, self._orders, self.memory, self._in_flight, os.getpid())
        self.end: Callable[[], None] = weakref.finalize(self, _end, *parts)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._in_flight.clear()

    def ask(self, order: Mapping[str, Any]) -> None:
        """Give an order and wait for the answer; `CheckpointError` if it could not be carried out."""
        assert not self._in_flight, "an order before the save in flight was waited for"
        if error := self._orders.receive(self._orders.send(order)):
            raise CheckpointError(error)

    def begin(self, order: Mapping[str, Any], what: str) -> None:
        """Give an order whose answer `finish` reads."""
        self._in_flight.append((self._orders.send(order), what))

    def has_answer(self) -> bool:
        """Whether `finish` will not wait."""
        return all(self._orders.has_answer(number) for number, _ in self._in_flight)

    def finish(self) -> None:
        """See `BackgroundWriter.finish`."""
        if not self._in_flight:
            return
        number, what = self._in_flight[0]
        if not self._orders.has_answer(number):
            announce(f"waiting for the asynchronous {what}")
        error = self._orders.receive(number)
        self._in_flight.clear()  # not before: an interrupt of the wait leaves it in flight
        if error:
            raise _failure(what, error)


def _failure(what: str, error: str) -> CheckpointError:
    return CheckpointError(f"the asynchronous {what} has failed: {error}")


def _end(
    process: "subprocess.Popen[bytes]",
    orders: Orders,
    memory: SharedMemory,
    in_flight: list[tuple[int, str]],
    owner: int,
) -> None:
    """Let the writer process complete its order and end."""
    if os.getpid() != owner:
        return  # a fork of the process that started it
    if in_flight and process.poll() is None:
        announce(f"waiting for the asynchronous {in_flight[0][1]} before the program ends")
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    for number, what in in_flight:
        if error := orders.receive(number):
            logger.error("%s", _failure(what, error))
    in_flight.clear()
    process.stdout.close()
    process.wait()
    memory.close()


def _copy(files: Mapping[str, Any], memory: SharedMemory) -> list[dict[str, Any]]:
    """Write each state into `memory`, over what an earlier save left; gives name, offset and bytes of each."""
    staged = []
    memory.position = 0
    for name, state in files.items():
        offset = memory.position
        write_state(state, memory)
        staged.append({"name": name, "offset": offset, "bytes": memory.position - offset})
        memory.position = -(-memory.position // mmap.PAGESIZE) * mmap.PAGESIZE
    return staged
