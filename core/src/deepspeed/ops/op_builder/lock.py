"""A lock keeps builders apart and ends with its process; a mark in a temporary folder's name says whose it is.

`filelock` would do where `flock` works. On a file system that refuses it (Lustre without the mount option) it waits for
a file that a killed process has left; here several processes then build the same content. For the folders a lock is
not enough either: not every file system has locks that reach other machines (NFS with `local_lock`).
"""

import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

_IN_NAME = re.compile(r"\.([0-9a-f]{12})-(\d+)-(\d+)\.")
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, on_wait: Callable[[str, float], None]) -> Iterator[None]:
    """Hold the lock file at `path` (`flock`: the system drops it when the holder dies, also by SIGKILL).

    The file itself stays: removing it would let two processes lock two files of one name. On a file system without
    locks the body runs unlocked, which costs a second compile and nothing else: see `cache.py`.

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


# ----- temporary folders ----------------------------------------------------------------------------------------------


def owner_mark() -> str:
    """`<machine>-<process id>-<time of its start>` of this process: no other process ever has the same."""
    return f"{_this_machine()}-{os.getpid()}-{started_at(os.getpid()) or 0}"


def has_owner(name: str) -> bool:
    """Whether a file name has a mark: `<anything>.<mark>.<anything>`."""
    return _IN_NAME.search(name) is not None


def owner_has_ended(name: str) -> bool:
    """Whether the process of the mark in a file name is known to have ended. One of another machine is not known."""
    mark = _IN_NAME.search(name)
    return mark is not None and mark[1] == _this_machine() and (started_at(int(mark[2])) or "0") != mark[3]


def started_at(pid: int) -> str | None:
    """When the process `pid` started, since an id is used again after a while. None: there is none, or a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if os.path.exists("/proc/self/stat") else _started_without_proc(pid)
    return None if after_name[0] in ("Z", "X") else after_name[19]


def _started_without_proc(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(int(process.create_time()))
    except psutil.NoSuchProcess:
        return None


@lru_cache(maxsize=1)
def _this_machine() -> str:
    """Digest of host name, boot and process-id namespace: process ids of one value can be compared."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [os.uname().nodename]
    parts += [boot.read_text().strip()] if boot.exists() else []
    parts += [os.readlink(namespace)] if namespace.is_symlink() else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
