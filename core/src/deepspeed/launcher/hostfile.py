"""The hostfile: one line `host slots=N` per node.

`runner.py` reads it once at the start; `fetch_hostfile` is a documented name that other tools call.
"""

import os
import re
from collections.abc import Iterable

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
