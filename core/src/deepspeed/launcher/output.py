"""Pass on the output of the ranks at once, copy it to files on request, and keep its end for failure reports.

`node_agent.py` opens the pipes before a rank starts. One thread here empties all pipes, even if the console or a file
fails, because a rank blocks when its pipe is full. Bytes pass unchanged, so progress bars and colors survive. Only
files are written in whole lines, so that two streams in one file do not mix.

Uncaught exceptions (`UncaughtReports`) are not printed at once, because most are consequences of another rank's
failure. `launch.py` prints the cause when the job has ended. If a rank still runs `PATIENCE_S` after its report,
because its teardown hangs or a thread keeps it alive, its exception is printed then.
"""

import os
import select
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deepspeed.errors import ConfigError
from deepspeed.uncaught import SHOWS_STACKS, Uncaught

PATIENCE_S = 15.0


class UncaughtReports:
    """The read end of one rank's pipe for uncaught exceptions; `OutputReader` reads it like a stream.

    Args:
        read_fd: file descriptor, which this object owns from now on.
        rank: global rank, for messages.
        log: writes bytes into the rank's log file; None without a file.
    """

    def __init__(self, read_fd: int, rank: int, log: Callable[[bytes], None] | None) -> None:
        self.read_fd = read_fd
        self.is_closed = False
        self.last: Uncaught | None = None
        self.was_printed = False
        self.shows_stacks = False  # the rank answers `STACK_SIGNAL`
        self.stacks: list[str] | None = None  # lines of the answer, once `expect_stacks` was called
        self._rank = rank
        self._log = log
        self._due_s = 0.0
        self._unfinished_line = bytearray()

    def take(self, data: bytes) -> None:
        self._unfinished_line += data
        *lines, self._unfinished_line = self._unfinished_line.split(b"\n")
        for line in lines:
            self._take_report(bytes(line))

    def expect_stacks(self) -> None:
        """Treat later lines that are no reports as the answer to `STACK_SIGNAL`."""
        self.stacks = []

    def _take_report(self, line: bytes) -> None:
        if line + b"\n" == SHOWS_STACKS:
            self.shows_stacks = True
            return
        try:
            self.last = Uncaught.decode(line)
        except ValueError:
            if self.stacks is not None:
                self.stacks.append(line.decode(errors="replace"))
                return
            # not from our hook: the script wrote into our file descriptor
            write_console(2, line + b"\n")
            return
        self.was_printed = False
        self._due_s = time.monotonic() + PATIENCE_S
        if self._log is not None:
            self._log(self.last.traceback.encode(errors="replace"))

    def finish(self) -> None:
        self.is_closed = True
        os.close(self.read_fd)

    def print_if_due(self, now_s: float) -> float | None:
        """Print the exception of a rank that still runs, or return the seconds until it is due, or None."""
        if self.last is None or self.was_printed or self.is_closed:
            return None
        if now_s < self._due_s:
            return self._due_s - now_s
        text = f"deepspeed: rank {self._rank} still runs after an uncaught exception:\n{self.last.traceback}"
        self.was_printed = write_console(2, text.encode(errors="replace"))
        return None


def write_console(fd: int, data: bytes) -> bool:
    """Write all of `data`, waiting while `fd` is full, even if non-blocking. Return False if the reader is gone."""
    try:
        write_all(fd, data)
    except OSError:  # the reader is gone (`| head`); the ranks go on, and their pipes are still emptied
        return False
    return True


def write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a program that shares it made it non-blocking, and it is full now
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()


class LogFile:
    """One rank's log file for both streams. A file that fails on a write is closed, with one warning."""

    def __init__(self, path: Path, appends: bool) -> None:
        self._path = path
        mode = os.O_APPEND if appends else os.O_TRUNC
        try:
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666)
        except OSError as error:
            raise ConfigError(
                f"--log_dir: {path} cannot be written ({error.strerror}); give another directory"
            ) from error

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def write(self, data: bytes | bytearray) -> None:
        if self._fd is None:
            return
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._warn(error)
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            os.close(fd)
        except OSError as error:  # some network file systems report a full disk only now
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        write_console(
            2,
            f"deepspeed: warning: {self._path} cannot be written ({error.strerror}); the job goes on, and this rank's "
            "output goes to the console only\n".encode(),
        )


_CHUNK_BYTES = 65536
_TAIL_BYTES = 262144  # bytes of stderr that are kept per rank, enough for a deep traceback


class RankPipes(NamedTuple):
    """Write ends for a rank: stdout (`None`: inherited), stderr, and the pipe for uncaught exceptions, if any."""

    stdout: int | None
    stderr: int
    uncaught: int | None

    def close(self) -> None:
        for fd in self:
            if fd is not None:
                os.close(fd)


class _Stream:
    """One pipe: its destinations, and its last bytes. With `log_only` the console is used only without a file."""

    def __init__(self, read_fd: int, console_fd: int, file: LogFile | None, log_only: bool) -> None:
        self.read_fd = read_fd
        self.tail = bytearray()
        self.is_closed = False
        self.was_shown = not log_only
        self._console_fd: int | None = console_fd
        self._file = file
        self._log_only = log_only
        self._unfinished_line = bytearray()

    def take(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-_TAIL_BYTES]
        if self._file is not None and self._file.is_open:
            self._unfinished_line += data
            whole = self._unfinished_line.rfind(b"\n") + 1
            self._file.write(self._unfinished_line[:whole])
            del self._unfinished_line[:whole]
        if not self._log_only or self._file is None or not self._file.is_open:
            self._show(data)

    def _show(self, data: bytes) -> None:
        if self._console_fd is not None and not write_console(self._console_fd, data):
            self._console_fd, self.was_shown = None, False

    def finish(self) -> None:
        if self._file is not None:
            self._file.write(self._unfinished_line)
        self.is_closed = True
        os.close(self.read_fd)


class OutputReader:
    """Reads the pipes of all ranks of this node. Order of calls: `open_rank` per rank, `start`, `finish`; the other
    methods at any time.

    Without `log_dir` only stderr has a pipe; ranks inherit the launcher's stdout, so a terminal remains a terminal.

    Args:
        log_dir: directory of the files, created if needed; None for no files.
        log_only: whether output that goes to a file is kept off the console.
        collect_uncaught: whether each rank gets a pipe for its uncaught exception; see `deepspeed.uncaught`.
        appends: whether to append to existing files instead of overwriting them.
    """

    def __init__(
        self, log_dir: str | None, log_only: bool, collect_uncaught: bool = False, appends: bool = False
    ) -> None:
        self._appends = appends
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._log_only = log_only
        self._collect_uncaught = collect_uncaught
        self._files: dict[int, LogFile] = {}
        self._streams: dict[int, list[_Stream | UncaughtReports]] = {}
        self._stderr: dict[int, _Stream] = {}
        self._uncaught: dict[int, UncaughtReports] = {}
        self._lock = threading.Lock()  # held during each read: `drain` reads in the caller's thread
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="rank-output", daemon=True)
        if self._log_dir is not None:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--log_dir {log_dir}: cannot be made ({error.strerror}); give a directory that can be written"
                ) from error

    def open_rank(self, rank: int) -> RankPipes:
        """Return the write ends for a rank. The caller closes them once the rank runs."""
        if self._log_dir is not None:
            self._files[rank] = LogFile(self._log_dir / f"rank_{rank}.log", self._appends)
        file = self._files.get(rank)
        self._streams[rank] = []
        stdout_fd = None if file is None else self._open_stream(rank, 1)
        stderr_fd = self._open_stream(rank, 2)
        return RankPipes(stdout_fd, stderr_fd, self._open_uncaught(rank) if self._collect_uncaught else None)

    def _open_stream(self, rank: int, console_fd: int) -> int:
        read_fd, write_fd = os.pipe()
        stream = _Stream(read_fd, console_fd, self._files.get(rank), self._log_only)
        if console_fd == 2:
            self._stderr[rank] = stream
        self._register(rank, stream)
        return write_fd

    def _open_uncaught(self, rank: int) -> int:
        read_fd, write_fd = os.pipe()
        file = self._files.get(rank)
        reports = UncaughtReports(read_fd, rank, None if file is None else file.write)
        self._uncaught[rank] = reports
        self._register(rank, reports)
        return write_fd

    def _register(self, rank: int, stream: _Stream | UncaughtReports) -> None:
        os.set_blocking(stream.read_fd, False)
        self._selector.register(stream.read_fd, selectors.EVENT_READ, stream)
        self._streams[rank].append(stream)

    def start(self) -> None:
        """Start the thread. Called after the last rank has started: forking a process with threads is unsafe."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread.start()

    def finish(self) -> None:
        """Read the remaining output, and stop. Called once, after every rank has ended; does not wait for daemons."""
        if self._thread.ident is not None:
            os.write(self._wake_write, b"x")
            self._thread.join()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        for file in self._files.values():
            file.close()
        self._selector.close()

    def drain(self, rank: int) -> None:
        """Read all output that `rank` has written so far, in the caller's thread."""
        for stream in self._streams.get(rank, ()):
            self._read(stream, once=False)

    def was_shown(self, rank: int) -> bool:
        """Return whether the whole stderr of `rank` was written to the console without an error."""
        return rank in self._stderr and self._stderr[rank].was_shown

    def stderr_tail(self, rank: int) -> str:
        """Return the last 256 KiB read from the stderr of `rank`."""
        return self._stderr[rank].tail.decode(errors="replace") if rank in self._stderr else ""

    def uncaught(self, rank: int) -> Uncaught | None:
        """Return the last uncaught exception read from the pipe of `rank`, or None."""
        return self._uncaught[rank].last if rank in self._uncaught else None

    def shows_stacks(self, rank: int) -> bool:
        """Return whether `rank` answers `STACK_SIGNAL`; if so, treat its further lines as the answer."""
        reports = self._uncaught.get(rank)
        if reports is None or not reports.shows_stacks:
            return False
        reports.expect_stacks()
        return True

    def stacks(self, rank: int) -> list[str]:
        """Return the lines of the answer to `STACK_SIGNAL` read so far; [] without `shows_stacks`."""
        reports = self._uncaught.get(rank)
        return [] if reports is None or reports.stacks is None else list(reports.stacks)

    def unprinted(self) -> list[tuple[int, Uncaught]]:
        """Return rank and exception of each report that was not printed."""
        reports = ((rank, reports.last) for rank, reports in self._uncaught.items() if not reports.was_printed)
        return [(rank, last) for rank, last in reports if last is not None]

    def _run(self) -> None:
        stopping = False
        while not stopping:
            for key, _ in self._selector.select(self._seconds_to_next_report()):
                if key.data is None:
                    stopping = True
                else:
                    self._read(key.data, once=True)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._read(key.data, once=False):
                key.data.finish()

    def _seconds_to_next_report(self) -> float | None:
        """Print the exceptions that are due, and return the seconds until the next one is due, or None."""
        now = time.monotonic()
        waits = [reports.print_if_due(now) for reports in self._uncaught.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _read(self, stream: _Stream | UncaughtReports, once: bool) -> bool:
        """Empty the pipe of `stream` (one chunk if `once`); return False if the pipe has ended and is closed."""
        with self._lock:
            while not stream.is_closed:
                try:
                    data = os.read(stream.read_fd, _CHUNK_BYTES)
                except BlockingIOError:
                    return True
                if not data:
                    self._selector.unregister(stream.read_fd)
                    stream.finish()
                    return False
                stream.take(data)
                if once:
                    return True
            return False
