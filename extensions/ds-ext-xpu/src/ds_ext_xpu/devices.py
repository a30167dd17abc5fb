"""Find the Intel GPUs of this machine, and the GPUs that this process may use. Called by the probe.

The functions only read the file system, without Level Zero, SYCL or torch. A call takes about a millisecond, creates no
device context, and so does not affect a process that forks later.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

AFFINITY_MASK = "ZE_AFFINITY_MASK"

_INTEL = "0x8086"
_DRIVERS = ("i915", "xe")
# Intel's GPUs have one or two tiles. Level Zero may show each tile as a device (ZE_FLAT_DEVICE_HIERARCHY). So the file
# system gives the maximum number of devices, not the actual number.
_MOST_TILES = 2


@dataclass(frozen=True)
class Gpus:
    """The Intel GPUs that `present` found.

    Fields:
        nodes: all device nodes of Intel GPUs with a GPU driver, for example `("/dev/dri/renderD128",)`.
        absent: the nodes missing from /dev/dri. The kernel shows a container all GPUs of the machine.
        closed: the nodes that exist and that this process may not open.
    """

    nodes: tuple[str, ...]
    absent: tuple[str, ...]
    closed: tuple[str, ...]


def present(root: Path = Path("/")) -> Gpus:
    """Return the Intel GPUs that the kernel shows.

    Args:
        root: the root of the file system; tests pass another folder.
    """
    found = sorted((root / "sys/class/drm").glob("renderD*"), key=lambda node: (len(node.name), node.name))
    names = [node.name for node in found if _is_intel_gpu(node / "device")]
    there = [name for name in names if os.path.exists(root / "dev/dri" / name)]
    absent = [name for name in names if name not in there]
    closed = [name for name in there if not os.access(root / "dev/dri" / name, os.R_OK | os.W_OK)]
    return Gpus(*(tuple(f"/dev/dri/{name}" for name in some) for some in (names, absent, closed)))


def visible(count: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `ZE_AFFINITY_MASK` leaves this process at least one of `count` GPUs.

    The mask lists devices (`"0,2"`) or tiles (`"0.1"`). An entry that is no number counts; Level Zero checks it later.
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
