"""Fault counts of this host from the kernel, for the hook `ds_device_faults`.

Memory: EDAC, one pair of counts per memory controller (Documentation/driver-api/edac.rst). Heat: how often the cores
that this process may use were throttled. Virtual machines and hosts without these drivers have neither.
"""

import functools
import os
from pathlib import Path

_SYSTEM = Path("sys/devices/system")


def count(root: Path = Path("/")) -> dict[str, int]:
    """Count each kind of fault since the kernel's driver started.

    Args:
        root: the root of the file system; tests replace it.
    """
    system = root / _SYSTEM
    controllers = sorted((system / "edac/mc").glob("mc[0-9]*"))
    throttles = [system / f"cpu/cpu{each}/thermal_throttle/core_throttle_count" for each in _cores()]
    files = {
        "memory errors, corrected": [each / "ce_count" for each in controllers],
        "memory errors, not corrected": [each / "ue_count" for each in controllers],
        "slowdowns by heat": throttles,
    }
    found = {kind: [_number(path) for path in paths] for kind, paths in files.items()}
    counts = {kind: [each for each in numbers if each is not None] for kind, numbers in found.items()}
    return {kind: sum(numbers) for kind, numbers in counts.items() if numbers}


@functools.cache
def _cores() -> tuple[int, ...]:
    """Return the usable cores at the first call: old faults of a core that is added later would look like new ones."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def _number(path: Path) -> int | None:
    """Return the number in a kernel file; None if the file does not exist or cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
