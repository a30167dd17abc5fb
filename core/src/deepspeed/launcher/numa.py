"""Functions here choose which cores each rank gets.

`launch.py` calls `available_cores` (or `parse_core_list` for `--bind_core_list`) and `share_cores` before the ranks
start. Scripts that bind themselves find the functions with DeepSpeed's names at `deepspeed.utils.numa`. Memory follows:
with the kernel's first-touch policy a rank's pages lie on the node of its cores.
"""

import glob
import os
import re
import shutil
from collections.abc import Sequence

from deepspeed.errors import ConfigError, counted

_CORE_LIST_PART = re.compile(r"^(\d+)(?:-(\d+))?$")


def parse_core_list(text: str) -> list[int]:
    """`"0-3,8"` -> `[0, 1, 2, 3, 8]`, in the order written.

    Raises:
        ConfigError: the text is malformed, a range runs backwards, or a core comes twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = _CORE_LIST_PART.match(part.strip())
        if match is None:
            raise ConfigError(f"--bind_core_list {text}: found {part!r}; write numbers and ranges, for example 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"--bind_core_list {text}: the range {part.strip()} runs backwards; write {last}-{first}")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        twice = next(core for core in cores if cores.count(core) > 1)
        raise ConfigError(f"--bind_core_list {text}: core {twice} comes twice; name each core once")
    return cores


def parse_range(rng: str) -> list[int]:
    """`parse_core_list` of one range, as DeepSpeed names it: "0-3"."""
    return parse_core_list(rng)


def parse_range_list(range_str: str) -> list[int]:
    """`parse_core_list`, as DeepSpeed names it."""
    return parse_core_list(range_str)


def available_cores() -> list[int]:
    """The cores this process may use, one hardware thread per physical core, those of one NUMA node side by side.

    Raises:
        ConfigError: the system has no way to bind a process to cores.
    """
    allowed = _allowed_cores()
    node_of = _node_of_core()
    first_threads = [core for core in sorted(allowed) if core == min(_siblings(core) & allowed)]
    return sorted(first_threads, key=lambda core: (node_of.get(core, 0), core))


def check_cores(cores: Sequence[int]) -> None:
    """Refuse cores that this process may not use: the machine has them not, or a container or scheduler took them.

    Raises:
        ConfigError: naming the first such core and those that may be used.
    """
    allowed = _allowed_cores()
    for core in cores:
        if core not in allowed:
            raise ConfigError(
                f"--bind_core_list: core {core} is not for this process, which may use {format_cores(sorted(allowed))}"
            )


def share_cores(cores: Sequence[int], num_ranks: int) -> list[list[int]]:
    """`cores` in `num_ranks` neighbouring shares of equal size; what does not divide stays idle, so no rank waits.

    Raises:
        ConfigError: there are fewer cores than ranks.
    """
    size = len(cores) // num_ranks
    if size == 0:
        raise ConfigError(
            f"--bind_cores_to_rank: {counted(num_ranks, 'rank')} cannot share {counted(len(cores), 'core')} "
            f"({format_cores(cores)}); start at most {len(cores)} with --num_accelerators, or list more cores with "
            "--bind_core_list"
        )
    return [list(cores[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def format_cores(cores: Sequence[int]) -> str:
    """`[0, 1, 2, 8]` -> `"0-2,8"`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def get_numa_cores() -> list[list[int]]:
    """The hardware threads of each NUMA node, in the order of nodes; [] where the system does not say."""
    by_node: dict[int, list[int]] = {}
    for core, node in sorted(_node_of_core().items()):
        by_node.setdefault(node, []).append(core)
    return [by_node[node] for node in sorted(by_node)]


def check_for_numactl_pkg() -> bool:
    """Whether there is a command `numactl`."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return how many cores a rank gets, and the beginning of a command that binds the rank to these cores.

    The launcher needs no such command: `--bind_cores_to_rank` binds the ranks itself, to the same cores.

    Args:
        bind_core_list: cores for all ranks, such as "0-3,8"; None: those that this process may use.

    Raises:
        ConfigError: as `parse_core_list` and `share_cores` raise it; or there is no `numactl`.
    """
    if not check_for_numactl_pkg():
        raise ConfigError(
            "get_numactl_cmd: found no command numactl; install it, or use deepspeed --bind_cores_to_rank"
        )
    cores = available_cores() if bind_core_list is None else parse_core_list(bind_core_list)
    own = share_cores(cores, num_local_procs)[local_rank]
    return len(own), ["numactl", "-C", format_cores(own)]


def _allowed_cores() -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--bind_cores_to_rank: this system cannot bind a process to cores; omit the flag")
    return os.sched_getaffinity(0)


def _siblings(core: int) -> set[int]:
    """The hardware threads of `core`'s physical core; only itself where the system does not say."""
    path = f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return set(_read_cores(path)) or {core}


def _node_of_core() -> dict[int, int]:
    nodes = {}
    for path in glob.glob("/sys/devices/system/node/node[0-9]*/cpulist"):
        node = int(path.split("/")[-2].removeprefix("node"))
        nodes.update(dict.fromkeys(_read_cores(path), node))
    return nodes


def _read_cores(path: str) -> list[int]:
    if not os.path.isfile(path):
        return []
    with open(path, encoding="ascii") as file:
        text = file.read().strip()
    return parse_core_list(text) if text else []
