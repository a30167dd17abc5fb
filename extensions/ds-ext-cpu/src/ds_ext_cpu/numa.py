"""Read the NUMA nodes of this machine from `/sys` (Linux), without a library or a command."""

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def usable_nodes(nodes: Path = _NODES) -> dict[int, list[int]]:
    """Map each NUMA node to its cores that this process may run on. Nodes without such a core are left out.

    A node may have memory and no cores, and a container may have the cores of one node only. If nothing can be read,
    the result is one node with all cores. The result is never empty.

    Args:
        nodes: the folder of the kernel's node list; tests replace it.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found = {}
    for folder in nodes.glob("node[0-9]*"):
        try:
            cores = parse_core_list((folder / "cpulist").read_text())
        except OSError:  # some sandboxes hide the file
            continue
        mine = sorted(allowed.intersection(cores))
        if mine:
            found[int(folder.name.removeprefix("node"))] = mine
    return dict(sorted(found.items())) or {0: sorted(allowed)}


def parse_core_list(text: str) -> list[int]:
    """Parse the kernel's core list format: `"0-3,8"` -> `[0, 1, 2, 3, 8]`. Empty text gives no cores."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cores.extend(range(int(first), int(last or first) + 1))
    return cores
