"""The hostfile, and the language of `--include` and `--exclude`, say which slots of which hosts a job uses.

    NODE[@NODE ...]    NODE = HOST[:SLOT[,SLOT ...]]

`localhost:0,2@worker-1` means slots 0 and 2 of localhost and every slot of worker-1. A slot that is named twice is one
slot, and a host that is named twice has the slots of both. The hostfile has one line `host slots=N` per node.
`runner.py` reads it once at the start; `fetch_hostfile` and the two functions that parse a resource pool are documented
names, which other tools call.
"""

import os
import re
from collections.abc import Iterable, Mapping

from deepspeed.errors import ConfigError

_LINE = re.compile(r"^(?P<host>\S+)\s+slots\s*=\s*(?P<slots>[0-9]+)$")
# a host reaches the command lines of ssh, pdsh and MPI: no options, no lists, nothing of a shell
HOST = re.compile(r"[A-Za-z0-9_][\w.:@-]*", re.ASCII)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Hosts and their number of slots in the file's order; `None`, with a warning, if there is no such file.

    Raises:
        ConfigError: a line is malformed, a host comes twice, or there is no host; the message names file and line.
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
    """The same from lines of text; `#` starts a comment. `name` is used in messages only."""
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
    """Host -> its slots in ascending order, or `None` for all of them.

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
    """`host_info` (host -> slots) cut down by one of the two filters; hosts stay in order, empty hosts go.

    Raises:
        ConfigError (a ValueError): both filters given, a malformed one, or a host or slot that does not exist.
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
    """The same for a pool that gives the number of slots of each host, as `fetch_hostfile` returns it."""
    return parse_resource_filter(
        {host: list(range(count)) for host, count in resource_pool.items()},
        include_str=inclusion,
        exclude_str=exclusion,
    )


def is_local(host: str) -> bool:
    """Whether `host` is this machine: its name, or an address of its own. No name service is asked: that could hang."""
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
