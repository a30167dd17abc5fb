"""What the ranks print: passed on at once, copied to files if asked for, its end remembered for the failure report.

`node_agent.py` opens the pipes before a rank starts; one thread here empties them all. Bytes go through untouched, so
progress bars and colours survive; only files are written in whole lines, so that two streams in one file do not mix.
"""

import os
import selectors
import threading
from pathlib import Path
from typing import BinaryIO

from deepspeed.errors import ConfigError

_CHUNK_BYTES = 65536
_TAIL_BYTES = 262144  # the end of stderr that is kept per rank: room for a deep traceback


class _Stream:
    """One pipe: where its bytes go, and the last of them."""

    def __init__(self, read_fd: int, console_fd: int | None, file: BinaryIO | None) -> None:
        self.read_fd = read_fd
        self.console_fd = console_fd
        self.file = file
        self.tail = bytearray()
        self._unfinished_line = bytearray()

    def take(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-_TAIL_BYTES]
        if self.console_fd is not None:
            try:
                _write_all(self.console_fd, data)
            except OSError:  # the console went away (`| head`): the ranks run on, and their pipes are still emptied
                self.console_fd = None
        if self.file is not None:
            self._unfinished_line += data
            whole = self._unfinished_line.rfind(b"\n") + 1
            self.file.write(self._unfinished_line[:whole])
            del self._unfinished_line[:whole]

    def finish(self) -> None:
        if self.file is not None:
            self.file.write(self._unfinished_line)
        os.close(self.read_fd)


class OutputReader:
    """The pipes of all ranks of this node. Order of calls: `open_rank` per rank, `start`, `finish`, `stderr_tail`.

    Without `log_dir` only stderr comes through here; stdout stays the launcher's own, so a terminal remains one.
    """

    def __init__(self, log_dir: str | None, log_only: bool) -> None:
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._log_only = log_only
        self._files: list[BinaryIO] = []
        self._stderr: dict[int, _Stream] = {}
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

    def open_rank(self, rank: int) -> tuple[int | None, int]:
        """Write ends for a rank: stdout (`None`: inherit) and stderr; closed by the caller once the rank runs."""
        file = self._open_file(rank)
        stdout_fd = None if file is None else self._open_pipe(1, file)[0]
        stderr_fd, self._stderr[rank] = self._open_pipe(2, file)
        return stdout_fd, stderr_fd

    def _open_file(self, rank: int) -> BinaryIO | None:
        if self._log_dir is None:
            return None
        path = self._log_dir / f"rank_{rank}.log"
        try:
            file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"--log_dir: {path} cannot be written ({error.strerror}); give another directory"
            ) from error
        self._files.append(file)
        return file

    def _open_pipe(self, console_fd: int, file: BinaryIO | None) -> tuple[int, _Stream]:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        stream = _Stream(read_fd, None if self._log_only else console_fd, file)
        self._selector.register(read_fd, selectors.EVENT_READ, stream)
        return write_fd, stream

    def start(self) -> None:
        """Begin to read; called after the last rank was started, because forking a process with threads is delicate."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread.start()

    def finish(self) -> None:
        """Read what is there, and stop; called once, when every rank has ended. Does not wait for a rank's daemons."""
        if self._thread.ident is not None:
            os.write(self._wake_write, b"x")
            self._thread.join()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        for file in self._files:
            file.close()
        self._selector.close()

    def was_shown(self, rank: int) -> bool:
        """Whether all that `rank` wrote to stderr went to the console, and the console took it."""
        return rank in self._stderr and self._stderr[rank].console_fd is not None

    def stderr_tail(self, rank: int) -> str:
        """The last 256 KiB that `rank` wrote to stderr; called after `finish`."""
        return self._stderr[rank].tail.decode(errors="replace") if rank in self._stderr else ""

    def _run(self) -> None:
        stopping = False
        while not stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    stopping = True
                else:
                    self._read(key.data, once=True)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and self._read(key.data, once=False):
                key.data.finish()

    def _read(self, stream: _Stream, once: bool) -> bool:
        """Empty the pipe of `stream` (one chunk if `once`); False if it ended, and was closed."""
        while True:
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


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
