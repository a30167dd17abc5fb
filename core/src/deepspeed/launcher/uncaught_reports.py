"""One rank's uncaught exceptions, and its stacks when it was asked for them, as `deepspeed.uncaught` sends them.

Exceptions are not printed as they come: most are the consequence of another rank's. `launch.py` prints the cause when
the job has ended. A rank that reported one and still runs after `PATIENCE_S`, since its teardown hangs or a thread
keeps it alive, is printed then.
"""

import os
import time
from collections.abc import Callable

from deepspeed.launcher.console import write_console
from deepspeed.uncaught import SHOWS_STACKS, Uncaught

PATIENCE_S = 15.0


class UncaughtReports:
    """The read end of one rank's pipe; `output.OutputReader` reads it like a stream.

    Args:
        read_fd: owned by this object from now on.
        rank: global rank, for messages.
        log: writes bytes into the rank's log file; None without one.
    """

    def __init__(self, read_fd: int, rank: int, log: Callable[[bytes], None] | None) -> None:
        self.read_fd = read_fd
        self.is_closed = False
        self.last: Uncaught | None = None
        self.was_printed = False
        self.shows_stacks = False  # the rank answers `STACK_SIGNAL`
        self.stacks: list[str] | None = None  # lines of its answer, once `expect_stacks` was called
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
        """From now on what is no report is an answer to `STACK_SIGNAL`."""
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
            # not from our hook: the script wrote into a descriptor that is not its own
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
        """Print the exception of a rank that still runs; the seconds until then if it is not time yet."""
        if self.last is None or self.was_printed or self.is_closed:
            return None
        if now_s < self._due_s:
            return self._due_s - now_s
        text = f"deepspeed: rank {self._rank} still runs after an uncaught exception:\n{self.last.traceback}"
        self.was_printed = write_console(2, text.encode(errors="replace"))
        return None
