"""This file measures what the process and the machine use of the host's memory, in bytes.

torch's CPU allocator keeps no count, so the process's resident set stands for "allocated": it holds the tensors, and
also the interpreter and the libraries. Control groups count: in a container the limit is the container's.
"""

import resource
import sys
from pathlib import Path

_PROC = Path("/proc/self")
_CGROUP = Path("/sys/fs/cgroup")
# (limit, present use) of control groups version 2 and version 1, relative to _CGROUP
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def resident_bytes() -> int:
    """Bytes of this process in physical memory now."""
    import psutil  # late: each rank and the launcher load this room before they ask for memory

    return int(psutil.Process().memory_info().rss)


def total_bytes() -> int:
    """Bytes of memory of the machine, or of the container when its limit is lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    cgroup = _cgroup_bytes()
    return total if cgroup is None else min(total, cgroup[0])


def available_bytes() -> int:
    """Bytes that can be taken without swapping, within the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    cgroup = _cgroup_bytes()
    return available if cgroup is None else min(available, max(0, cgroup[0] - cgroup[1]))


class PeakMemory:
    """The highest resident set of this process since the start or the last reset.

    Linux counts it (`VmHWM`) and can be reset (`/proc/self/clear_refs`). Elsewhere, or where the kernel
    forbids that, the peak after a reset is the highest figure seen by the calls made here since.
    """

    def __init__(self) -> None:
        self._seen: int | None = None  # None: the system's own counter is right

    def read(self) -> int:
        """The peak in bytes; never below `resident_bytes()`."""
        now = resident_bytes()
        if self._seen is None:
            return max(now, _system_peak_bytes())
        self._seen = max(self._seen, now)
        return self._seen

    def reset(self) -> None:
        """Reset to the present value."""
        self._seen = None if _reset_system_peak() else resident_bytes()


def _system_peak_bytes() -> int:
    try:
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no /proc: not Linux
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _reset_system_peak() -> bool:
    try:
        (_PROC / "clear_refs").write_text("5")  # man 5 proc: 5 resets VmHWM to the present resident set
    except OSError:
        return False
    return True


def _cgroup_bytes() -> tuple[int, int] | None:
    """(limit, use) of the control group, or None without a limit."""
    for limit_file, use_file in _CGROUP_FILES:
        try:
            limit = (_CGROUP / limit_file).read_text().strip()
            use = (_CGROUP / use_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and use.isdigit():  # "max" means no limit
            return int(limit), int(use)
    return None
