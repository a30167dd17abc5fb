"""A lock between the processes of a node that ends with its process, however that ends."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, on_wait: Callable[[str, float], None]) -> Iterator[None]:
    """Hold the lock file at `path` (`flock`: the system drops it when the holder dies, also by SIGKILL).

    The file itself stays: removing it would let two processes lock two files of one name. On a file system without
    locks, or with locks that other machines do not see, the body runs unlocked. That costs a second compile and nothing
    else: see `cache.py`.

    Args:
        path: in an existing folder.
        on_wait: called again and again while another process holds the lock, with who ("process 12 on host") and the
            seconds waited so far.

    Raises:
        OSError: the file cannot be made or written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held = False
    try:
        held = _acquire(descriptor, on_wait)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        if held:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough when a fork has the descriptor too
        os.close(descriptor)


def _acquire(descriptor: int, on_wait: Callable[[str, float], None]) -> bool:
    """Wait for the lock; False where there are none."""
    start = time.monotonic()
    pause_s = 0.005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(
                os.pread(descriptor, 200, 0).decode(errors="replace") or "another process", time.monotonic() - start
            )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return False
        else:
            return True
