"""Owner: which process made a temporary folder, written into the folder's name, and whether that process has ended.

A lock would answer that too, but not every file system has locks that reach other machines (NFS with `local_lock`,
Lustre with `localflock`).
"""

import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_IN_NAME = re.compile(r"\.([0-9a-f]{12})-(\d+)-(\d+)\.")


@dataclass(frozen=True)
class Owner:
    """A process of some machine.

    Attributes:
        machine: digest of host name, boot and process-id namespace: process ids of one value can be compared.
        pid: its id there.
        started: when it started, as `started_at` gives it: an id alone is used again after a while.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> "Owner":
        """The owner of what this process makes."""
        return cls(_this_machine(), os.getpid(), started_at(os.getpid()) or "0")

    @classmethod
    def of(cls, name: str) -> "Owner | None":
        """The owner in a file name `<anything>.<owner>.<anything>`; None when it has none."""
        found = _IN_NAME.search(name)
        return cls(found[1], int(found[2]), found[3]) if found else None

    def __str__(self) -> str:
        return f"{self.machine}-{self.pid}-{self.started}"

    def has_ended(self) -> bool:
        """Whether the process is known to have ended. One of another machine is not known."""
        return self.machine == _this_machine() and (started_at(self.pid) or "0") != self.started


def started_at(pid: int) -> str | None:
    """A number that differs between processes that had one id: the time of start. None: there is none, or a zombie."""
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
    parts = [os.uname().nodename, _text("/proc/sys/kernel/random/boot_id")]
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
