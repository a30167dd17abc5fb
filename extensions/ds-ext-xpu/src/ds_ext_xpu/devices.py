"""Which Intel GPUs this machine has and this process may use, read from the file system.

No Level Zero, no SYCL and no torch: an answer costs about a millisecond, makes no device context, and leaves a process
that forks later as it was. Asked by the probe.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

AFFINITY_MASK = "ZE_AFFINITY_MASK"

_INTEL = "0x8086"
_DRIVERS = ("i915", "xe")
# Intel's GPUs have one tile or two, and each is a device of its own where Level Zero does not put them together
# (ZE_FLAT_DEVICE_HIERARCHY): from the file system we know the most devices there can be, not how many there are.
_MOST_TILES = 2


@dataclass(frozen=True)
class Gpus:
    """What was found.

    Fields:
        nodes: the nodes of Intel GPUs with a GPU driver, for example `("/dev/dri/renderD128",)`.
        absent: those of them that /dev/dri has not: the kernel of a container shows the machine's, given to it or not.
        closed: those of them that are there and that this process may not open.
    """

    nodes: tuple[str, ...]
    absent: tuple[str, ...]
    closed: tuple[str, ...]


def present(root: Path = Path("/")) -> Gpus:
    """The Intel GPUs that the kernel shows.

    Args:
        root: in whose place tests have a folder of theirs.
    """
    found = sorted((root / "sys/class/drm").glob("renderD*"), key=lambda node: (len(node.name), node.name))
    names = [node.name for node in found if _is_intel_gpu(node / "device")]
    there = [name for name in names if os.path.exists(root / "dev/dri" / name)]
    absent = [name for name in names if name not in there]
    closed = [name for name in there if not os.access(root / "dev/dri" / name, os.R_OK | os.W_OK)]
    return Gpus(*(tuple(f"/dev/dri/{name}" for name in some) for some in (names, absent, closed)))


def visible(count: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `ZE_AFFINITY_MASK` leaves this process one of `count` GPUs.

    The mask lists devices, `"0,2"`, or tiles of them, `"0.1"`. What is no number is left for Level Zero to judge.
    """
    stated = environment.get(AFFINITY_MASK, "").strip()
    if not stated:
        return count > 0
    indices = [entry.strip().partition(".")[0] for entry in stated.split(",")]
    return any(not (index.isdecimal() and len(index) < 10) or int(index) < count * _MOST_TILES for index in indices)


def _is_intel_gpu(device: Path) -> bool:
    try:
        vendor = (device / "vendor").read_text().strip()
        driver = os.path.basename(os.readlink(device / "driver"))
    except OSError:  # a virtual node, or one without a driver
        return False
    return vendor == _INTEL and driver in _DRIVERS
