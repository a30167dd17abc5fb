"""The file of `--save_pid`: the launcher's process id in `/tmp/<pid>.ds`, where DeepSpeed documents it."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed.errors import ConfigError
from deepspeed.launcher.output import write_console

FOLDER = Path("/tmp")  # noqa: S108 - a documented address; the file is created and never followed as a link
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def pid_file() -> Iterator[Path]:
    """The file exists inside the `with`, also if a signal ends it early.

    Raises:
        ConfigError: it cannot be written, or another user's file of that name is there.
    """
    path = FOLDER / f"{os.getpid()}.ds"
    _exit_on_signals()
    others = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it is sure that the file will be removed
    try:
        inode = _write(path)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
        raise ConfigError(
            f"--save_pid: {path} cannot be written ({error.strerror}); remove it, or omit the flag"
        ) from error
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
        yield path
    finally:
        _remove(path, inode)


def _write(path: Path) -> int:
    """Replace what an older process of this number left, and return the new file's inode."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(fd, str(os.getpid()).encode())
        return os.fstat(fd).st_ino
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _remove(path: Path, inode: int) -> None:
    """Remove the file unless it is another one by now. The job's exit code does not depend on it."""
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        write_console(2, f"deepspeed: warning: --save_pid: {path} cannot be removed ({error.strerror})\n".encode())


def _exit_on_signals() -> None:
    """Until `launch.py` installs its own handlers, end by an exception, so that the file is removed."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
