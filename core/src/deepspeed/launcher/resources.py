"""Parse the hostfile and the filters `--include` and `--exclude`, which select the slots of each host.

    NODE[@NODE ...]    NODE = HOST[:SLOT[,SLOT ...]]

`localhost:0,2@worker-1` means slots 0 and 2 of localhost and every slot of worker-1. A slot that is named twice counts
once, and a host that is named twice gets the slots of both. The hostfile has one line `host slots=N` per node.
`runner.py` reads it once at the start. `fetch_hostfile` and the two functions that parse a resource pool are documented
names for other tools.

The functions at the end choose the cores of each rank: `launch.py` calls `available_cores` (or `parse_core_list` for
`--bind_core_list`) and `share_cores` before the ranks start. Scripts that bind themselves find the functions under
DeepSpeed's names in `deepspeed.utils.numa`. Memory needs no binding: under the kernel's first-touch policy, a rank's
pages lie on the NUMA node of its cores."""

import glob
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence

from deepspeed.errors import ConfigError, counted

_LINE = re.compile(r"^(?P<host>\S+)\s+slots\s*=\s*(?P<slots>[0-9]+)$")
# hosts go into command lines of ssh, pdsh and MPI, so they must not be options, lists or shell syntax
HOST = re.compile(r"[A-Za-z0-9_][\w.:@-]*", re.ASCII)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return host -> number of slots, in the file's order. Warn and return None if the file does not exist.

    Raises:
        ConfigError: a line is malformed, a host occurs twice, or there is no host; the message names file and line.
    """
    if not os.path.isfile(hostfile_path):
        from deepspeed.log import logger  # late: logging costs start-up time, and this line is rare

        logger.warning(f"--hostfile {hostfile_path}: no such file; going on with the devices of this machine alone")
        return None
    try:
        with open(hostfile_path, encoding="utf-8") as file:
            return parse_hostfile(file, name=hostfile_path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(
            f"--hostfile {hostfile_path}: cannot be read ({reason}); give a file with lines `host slots=N`"
        ) from error


def parse_hostfile(lines: Iterable[str], name: str = "hostfile") -> dict[str, int]:
    """Parse lines of a hostfile like `fetch_hostfile`; `#` starts a comment. `name` is used in messages only."""
    hosts: dict[str, int] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        if match is None:
            raise ConfigError(f"--hostfile {name}, line {number}: found {text!r}; write `host slots=N`")
        if HOST.fullmatch(match["host"]) is None:
            raise ConfigError(
                f"--hostfile {name}, line {number}: found {match['host']!r} where a host's name belongs; write "
                "`host slots=N`"
            )
        if match["host"] in hosts:
            raise ConfigError(
                f"--hostfile {name}, line {number}: host {match['host']} comes twice, first in line "
                f"{line_of[match['host']]}; give it one line"
            )
        if int(match["slots"]) == 0:
            raise ConfigError(
                f"--hostfile {name}, line {number}: host {match['host']} has slots=0; give it at least one, or remove "
                "the line"
            )
        line_of[match["host"]] = number
        hosts[match["host"]] = int(match["slots"])
    if not hosts:
        raise ConfigError(f"--hostfile {name}: names no host; write one line `host slots=N` per node")
    return hosts


def parse_node_list(text: str, flag: str) -> dict[str, list[int] | None]:
    """Return host -> slots in ascending order, or None for all slots.

    Raises:
        ConfigError: `text` is malformed; the message starts with `flag`.
    """
    nodes: dict[str, list[int] | None] = {}
    for part in text.split("@"):
        host, colon, slot_text = part.strip().partition(":")
        if not host:
            raise ConfigError(f"{flag} {text}: found no host in {part!r}; write for example localhost:0,1")
        slots = _parse_slots(slot_text, text, flag) if colon else None
        before = nodes.get(host, [])
        nodes[host] = None if slots is None or before is None else sorted({*before, *slots})
    return nodes


def _parse_slots(slot_text: str, text: str, flag: str) -> list[int]:
    slots = []
    for slot in slot_text.split(","):
        if not (slot.isascii() and slot.isdigit()):
            raise ConfigError(
                f"{flag} {text}: found {slot!r} where a slot number belongs; write for example localhost:0,1"
            )
        slots.append(int(slot))
    return sorted(set(slots))


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Apply one of the two filters to `host_info` (host -> slots). Hosts keep their order; empty hosts are removed.

    Raises:
        ConfigError (a ValueError): both filters are given, one is malformed, or a host or slot does not exist.
    """
    if include_str and exclude_str:
        raise ConfigError(f"--include {include_str} and --exclude {exclude_str} exclude each other; give one of them")
    if not include_str and not exclude_str:
        return {host: list(slots) for host, slots in host_info.items()}
    flag, text = ("--include", include_str) if include_str else ("--exclude", exclude_str)
    named = {}
    for host, slots in parse_node_list(text, flag).items():
        if host not in host_info:
            raise ConfigError(f"{flag} {text}: no host {host}; there are: {', '.join(host_info) or 'none'}")
        missing = sorted(set(slots or []) - set(host_info[host]))
        if missing:
            raise ConfigError(f"{flag} {text}: no slot {missing[0]} on {host}; there are: {_listed(host_info[host])}")
        named[host] = set(host_info[host] if slots is None else slots)
    kept = {}
    for host, slots in host_info.items():
        chosen = named.get(host, set())
        left = [slot for slot in slots if (slot in chosen) == bool(include_str)]
        if left:
            kept[host] = left
    return kept


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Apply one of the two filters to host -> number of slots, as returned by `fetch_hostfile`."""
    return parse_resource_filter(
        {host: list(range(count)) for host, count in resource_pool.items()},
        include_str=inclusion,
        exclude_str=exclusion,
    )


def is_local(host: str) -> bool:
    """Return whether `host` is the name or an address of this machine. No name service is used: it could hang."""
    name = os.uname().nodename
    return host in {"localhost", name, name.split(".")[0]} or _is_own_address(host)


def _is_own_address(host: str) -> bool:
    import ipaddress  # late: costs start-up time, and most hosts have names
    import socket

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def _listed(slots: list[int]) -> str:
    return ", ".join(map(str, slots)) or "none"


_CORE_LIST_PART = re.compile(r"^(\d+)(?:-(\d+))?$")


def parse_core_list(text: str) -> list[int]:
    """Parse a list of cores: `"0-3,8"` -> `[0, 1, 2, 3, 8]`, in the order written.

    Raises:
        ConfigError: the text is malformed, a range runs backwards, or a core occurs twice.
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
    """Parse one range such as "0-3": DeepSpeed's name for `parse_core_list`."""
    return parse_core_list(rng)


def parse_range_list(range_str: str) -> list[int]:
    """Parse a list of cores: DeepSpeed's name for `parse_core_list`."""
    return parse_core_list(range_str)


def available_cores() -> list[int]:
    """Return the cores this process may use, one hardware thread per physical core, grouped by NUMA node.

    Raises:
        ConfigError: the system has no way to bind a process to cores.
    """
    allowed = _allowed_cores()
    node_of = _node_of_core()
    first_threads = [core for core in sorted(allowed) if core == min(_siblings(core) & allowed)]
    return sorted(first_threads, key=lambda core: (node_of.get(core, 0), core))


def check_cores(cores: Sequence[int]) -> None:
    """Refuse cores that this process may not use: they do not exist, or a container or scheduler withholds them.

    Raises:
        ConfigError: the message names the first such core, and the cores that may be used.
    """
    allowed = _allowed_cores()
    for core in cores:
        if core not in allowed:
            raise ConfigError(
                f"--bind_core_list: core {core} is not for this process, which may use {format_cores(sorted(allowed))}"
            )


def share_cores(cores: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Divide `cores` into `num_ranks` contiguous shares of equal size; left-over cores stay idle, so no rank waits.

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
    """Format a list of cores: `[0, 1, 2, 8]` -> `"0-2,8"`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def get_numa_cores() -> list[list[int]]:
    """Return the hardware threads of each NUMA node, in node order; [] if the system does not list them."""
    by_node: dict[int, list[int]] = {}
    for core, node in sorted(_node_of_core().items()):
        by_node.setdefault(node, []).append(core)
    return [by_node[node] for node in sorted(by_node)]


def check_for_numactl_pkg() -> bool:
    """Return whether there is a command `numactl`."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the number of cores of a rank, and the prefix of a command that binds the rank to these cores.

    The launcher needs no such command: `--bind_cores_to_rank` binds the ranks to the same cores without `numactl`.

    Args:
        bind_core_list: cores for all ranks, such as "0-3,8"; None: the cores that this process may use.

    Raises:
        ConfigError: from `parse_core_list` and `share_cores`, or because there is no `numactl`.
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
    """Return the hardware threads of `core`'s physical core; only `core` if the system does not list them."""
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
