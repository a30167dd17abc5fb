"""Which process made a temporary folder, written into the folder's name, and whether that process has ended.

A lock would answer that too, but not every file system has locks that reach other machines (NFS with `local_lock`,
Lustre with `localflock`).
"""

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path

_IN_NAME = re.compile(r"\.([0-9a-f]{12})-(\d+)-(\d+)\.")


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
