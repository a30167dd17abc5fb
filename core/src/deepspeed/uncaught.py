"""Send a rank's uncaught exception to the `deepspeed` launcher, which prints the cause of a failed job once.

Otherwise every rank prints a traceback, and the first cause is somewhere among its consequences. `initialize` and
`init_distributed` call `report_to_launcher`. Through the same pipe a rank sends its stacks when the launcher requests
them (`STACK_SIGNAL`). With `DS_LOG_LEVEL=debug` the launcher provides no pipe. Without a launcher (`python train.py`),
only a `ConfigError` is handled: it is printed as one line without a traceback. May import `errors`.
"""

import contextlib
import faulthandler
import json
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from deepspeed.errors import ConfigError

PIPE_VARIABLE = (
    "DS_UNCAUGHT_PIPE"  # "<file descriptor>:<inode>", so that another file with this descriptor is not mistaken for it
)
_LIMIT_CHARS = 40_000  # maximum length of each field
# The launcher sends it to a rank that has written `SHOWS_STACKS`, to get the stacks of its threads. C code handles it,
# so it works while the rank waits in a library. A real-time signal, since scripts use SIGUSR1 and SIGUSR2.
STACK_SIGNAL: int = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0
SHOWS_STACKS = b'"stacks"\n'


class Uncaught(NamedTuple):
    """`Uncaught` describes the exception that ended a rank.

    Args:
        exception: type and message, `module.Type: message`.
        message: the message alone.
        is_config_error: whether it is a `ConfigError`, which needs no traceback.
        traceback: the whole text, ending in a newline.
    """

    exception: str
    message: str
    is_config_error: bool
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "Uncaught":
        kind, message = type(error), str(error)[:_LIMIT_CHARS]
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception(error))
        return cls(f"{name}: {message}", message, isinstance(error, ConfigError), text[-_LIMIT_CHARS:])

    def encode(self) -> bytes:
        """Return the fields as one line of JSON."""
        return json.dumps(self, ensure_ascii=False).encode(errors="replace") + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Uncaught":
        """Invert `encode`. Raises ValueError for anything else."""
        fields: Any = json.loads(line)
        if not isinstance(fields, list) or [type(field) for field in fields] != [str, str, bool, str]:
            raise ValueError(f"found {line[:80]!r}, expected the fields {', '.join(cls._fields)}")
        return cls(*fields)


class _Hook:
    """`_Hook` is a `sys.excepthook` that writes to the launcher's pipe, and otherwise calls `previous`."""

    def __init__(self, fd: int, inode: int, previous: Callable[..., Any]) -> None:
        self._fd, self._inode = fd, inode
        self._previous = previous
        self._pid = os.getpid()

    def __call__(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:  # not for KeyboardInterrupt: a user who presses Ctrl-C wants to see where each rank is
        is_ours = isinstance(error, Exception) and os.getpid() == self._pid and _is_pipe(self._fd, self._inode)
        if not (is_ours and self._send(error)):
            self._previous(kind, error, frames)

    def _send(self, error: BaseException) -> bool:
        try:
            os.write(self._fd, Uncaught.of(error).encode())
        except OSError:  # the launcher is gone; use the console instead
            return False
        return True


def report_to_launcher() -> None:
    """Send an uncaught exception of this process to the launcher that started it; later calls change nothing.

    Without a launcher, a `ConfigError` is printed in one line, unless the script has its own excepthook or
    `DS_LOG_LEVEL` is debug.
    """
    address = os.environ.pop(PIPE_VARIABLE, "")  # not for processes that this one starts
    fd, _, inode = address.partition(":")
    if fd.isdecimal() and inode.isdecimal() and len(fd) < 10 and len(inode) < 20 and _is_pipe(int(fd), int(inode)):
        sys.excepthook = _Hook(int(fd), int(inode), sys.excepthook)
        _show_stacks_when_asked(int(fd))
    elif sys.excepthook is sys.__excepthook__ and os.environ.get("DS_LOG_LEVEL", "").strip().upper() != "DEBUG":
        sys.excepthook = _print_uncaught


def has_launcher() -> bool:
    """Whether the `deepspeed` launcher started this process as a rank, and reads what it reports."""
    return PIPE_VARIABLE in os.environ or isinstance(sys.excepthook, _Hook)


def _show_stacks_when_asked(fd: int) -> None:
    """Make `STACK_SIGNAL` write the stacks of all threads to the launcher's pipe, and announce that to the launcher."""
    if STACK_SIGNAL and signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, fd, all_threads=True)
        with contextlib.suppress(OSError):  # the launcher is gone and will send no signal
            os.write(fd, SHOWS_STACKS)


def _print_uncaught(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    if isinstance(error, ConfigError):
        sys.stderr.write(f"deepspeed: error: {error}\n")
    else:
        sys.__excepthook__(kind, error, frames)


def _is_pipe(fd: int, inode: int) -> bool:
    try:
        status = os.fstat(fd)
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(status.st_mode) and status.st_ino == inode
