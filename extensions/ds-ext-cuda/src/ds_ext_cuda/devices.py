"""Which NVIDIA devices this machine has and this process may use, and whether the driver's library is there.

Devices are read from the file system, without NVML and torch: an answer costs less than a millisecond. The library is
loaded and not initialized, which takes milliseconds at the first time. Neither makes a device context, and a process
that forks later is as it was. Asked by the probe; devices also by the accelerator before torch has opened one.
"""

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DRIVER = "libcuda.so.1"

# what a driver leaves behind, in the order in which it is believed: a container sees all of /proc, and its own nodes
_NODES = re.compile(r"nvidia\d+")
_PROC = "proc/driver/nvidia/gpus"
# one node for all devices -> how it comes, and what shows that they are NVIDIA's
_SINGLE = {
    "dev/dxg": ("through WSL", "usr/lib/wsl/lib/libcuda.so.1"),
    "dev/nvmap": ("on a Tegra", "dev/nvmap"),
}


def present(root: Path = Path("/")) -> tuple[int, str]:
    """How many NVIDIA devices the kernel shows to this process, and where that was seen.

    WSL and Tegra boards show one node for all; they count as 1.

    Args:
        root: in whose place tests have a folder of theirs.

    Returns:
        `(2, "/dev/nvidia0, /dev/nvidia1")`, or `(0, "no /dev/nvidia0, ...")`.
    """
    nodes = sorted((name for name in _names(root / "dev") if _NODES.fullmatch(name)), key=lambda name: int(name[6:]))
    if nodes:
        return len(nodes), ", ".join(f"/dev/{name}" for name in nodes)
    gpus = _names(root / _PROC)
    if gpus:
        return len(gpus), f"/{_PROC}"
    for node, (how, witness) in _SINGLE.items():
        if (root / node).exists() and (root / witness).exists():
            return 1, f"/{node}, {how}"
    return 0, "no /dev/nvidia0, no /dev/dxg, no /dev/nvmap"


def visible(count: int, environment: Mapping[str, str] = os.environ) -> int:
    """How many of `count` devices `CUDA_VISIBLE_DEVICES` leaves to this process, by the driver's rules.

    The list counts up to its first entry that is no device, so that `-1` and an empty list hide all; an entry that
    stands twice makes the whole list invalid. A `MIG-` entry is one slice, and a process sees at most one of those.
    """
    stated = environment.get(VISIBLE_DEVICES)
    if stated is None:
        return count
    found: list[str] = []
    for entry in (part.strip() for part in stated.split(",")):
        if not _is_device(entry, count):
            break
        found.append(str(int(entry)) if _is_number(entry) else entry)
    if len(set(found)) < len(found):
        return 0
    if found and found[0].startswith("MIG-"):
        return 1
    return min(count, len(found))


def driver_obstacle() -> str | None:
    """Why the driver's library cannot be loaded; None: it is loaded now.

    A container that was given the device nodes and no driver has no such library, or an empty file in its place.
    `cuInit` is not called: a driver that loads and does not start is found by whoever opens a device.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return f"the driver's library cannot be loaded: {error}"
    return None


def _is_device(entry: str, count: int) -> bool:
    return int(entry) < count if _is_number(entry) else entry.startswith(("GPU-", "MIG-"))


def _is_number(entry: str) -> bool:
    return entry.isascii() and entry.isdigit() and len(entry) < 10


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not there, or hidden from this process
        return []
