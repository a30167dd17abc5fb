"""Find the NVIDIA devices of this machine that this process may use, and check that the driver's library loads.

`present` reads the file system, without NVML and torch, in less than a millisecond. `driver_obstacle` loads the library
without initializing it, which takes milliseconds the first time. Neither creates a device context, so the process can
still fork. The probe calls both. The accelerator counts devices here until torch initializes CUDA.
"""

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DRIVER = "libcuda.so.1"

# traces of the driver, the most reliable first: a container sees all of /proc, but only its own device nodes
_NODES = re.compile(r"nvidia\d+")
_PROC = "proc/driver/nvidia/gpus"
# node that stands for all devices -> its platform, and a path that exists only for NVIDIA devices
_SINGLE = {
    "dev/dxg": ("through WSL", "usr/lib/wsl/lib/libcuda.so.1"),
    "dev/nvmap": ("on a Tegra", "dev/nvmap"),
}


def present(root: Path = Path("/")) -> tuple[int, str]:
    """Return the number of NVIDIA devices that the kernel shows to this process, and where they were found.

    WSL and Tegra boards have one node for all devices, which counts as 1.

    Args:
        root: the root of the file system; tests replace it.

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
    """Return how many of `count` devices `CUDA_VISIBLE_DEVICES` leaves to this process, by the driver's rules.

    The list ends at its first entry that is not a device, so `-1` and an empty list hide all devices. A duplicate entry
    makes the whole list invalid. A `MIG-` entry is one slice of a device, and a process sees at most one slice.
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
    """Load the driver's library. Returns None, or why the library cannot be loaded.

    A container with the device nodes but without the driver has no such library, or an empty file in its place.
    `cuInit` is not called, so a driver that loads but does not start fails later, when a device is opened.
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
    except OSError:  # the folder does not exist, or is hidden from this process
        return []
