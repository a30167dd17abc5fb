"""The part of `ds_report` on the machine: where packages are installed, which toolkits there are, limits on memory.

A toolkit is what an op builder compiles with: the C++ compiler, and what the builders of installed extensions answer in
`OpBuilder.toolchain`. Nothing is compiled.
"""

import importlib.util
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed.cli.console import make_table
from deepspeed.errors import OpUnavailable, PluginError
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.toolchain import Toolchain, find_compiler, identify
from deepspeed.plugins import plugin_manager

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, never written


def collect_paths() -> dict[str, str | None]:
    """The folders of deepspeed, torch and the accelerator plugins; None for a plugin that could not be loaded."""
    manager = plugin_manager()
    plugins = {f"accelerator {name!r}": manager.folder(name) for name in manager.names()}
    return {"deepspeed": _folder("deepspeed"), "torch": _folder("torch"), **plugins}


def collect_machine() -> dict[str, int | None]:
    """Limits of this machine in bytes.

    Keys: `shared_memory_bytes` and `shared_memory_free_bytes` of /dev/shm, which ranks and the workers of data loaders
    share (None: there is none), `memlock_bytes`, what one process may pin (None: unlimited).
    """
    shared = shutil.disk_usage(_SHARED_MEMORY) if Path(_SHARED_MEMORY).is_dir() else None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "shared_memory_bytes": None if shared is None else shared.total,
        "shared_memory_free_bytes": None if shared is None else shared.free,
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
    }


def collect_toolkits() -> list[dict[str, Any]]:
    """One row per toolkit, or per reason why there is none.

    Keys: `used_by` ("core", and names of accelerators), `command`, `version` (what it says of itself, in one line),
    `reason` ("" where there is one; `command` and `version` are None otherwise).
    """
    rows: dict[tuple[str | None, str | None, str], list[str]] = {}
    for user, (command, version, reason) in _found():
        users = rows.setdefault((command, version, reason), [])
        if user not in users:
            users.append(user)
    return [
        {"used_by": users, "command": command, "version": version, "reason": reason}
        for (command, version, reason), users in rows.items()
    ]


def show_machine(report: dict[str, Any], console: Console) -> None:
    """Print what the three functions above found, under `paths`, `machine` and `toolkits` of `report`."""
    paths = ((name, folder or "not loaded") for name, folder in report["paths"].items())
    console.print(make_table("Install paths", ("package", "folder"), paths))
    toolkits = (
        (row["command"] or "missing", row["version"] or row["reason"], ", ".join(row["used_by"]))
        for row in report["toolkits"]
    )
    console.print(make_table("Toolkits", ("toolkit", "version", "used by"), toolkits))
    limits = (
        (f"shared memory ({_SHARED_MEMORY})", _shared_memory(report["machine"])),
        ("locked memory (ulimit -l)", _size(report["machine"]["memlock_bytes"], "unlimited")),
    )
    console.print(make_table("Memory limits", ("what", "size"), limits))


def _folder(module: str) -> str | None:
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _found() -> Iterator[tuple[str, tuple[str | None, str | None, str]]]:
    """(who uses it, (command, version, reason)), a toolkit as often as a builder names it."""
    yield "core", _asked(find_compiler)
    yield "core", _asked(lambda: identify(("cmake",)))
    manager = plugin_manager()
    for name in manager.names():
        try:
            builders = manager.op_builders(name)
        except PluginError:  # the part on the choice shows why
            continue
        for kind in builders.values():
            if issubclass(kind, OpBuilder):
                yield name, _asked(lambda kind=kind: kind().toolchain())


def _asked(toolchain: Any) -> tuple[str | None, str | None, str]:
    try:
        found: Toolchain = toolchain()
    except OpUnavailable as error:
        return None, None, str(error)
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        return None, None, f"{type(error).__name__}: {error}"
    program, *flags = found.command
    return " ".join([shutil.which(program) or program, *flags]), _version_line(found.identity), ""


def _version_line(identity: str) -> str:
    """The first line that holds a version: some compilers begin with their name and a copyright."""
    lines = identity.splitlines() or [""]
    return next((line.strip() for line in lines if re.search(r"\d+\.\d+", line)), lines[0].strip())


def _shared_memory(machine: dict[str, int | None]) -> str:
    if machine["shared_memory_bytes"] is None:
        return "none"
    return f"{_size(machine['shared_memory_bytes'])}, {_size(machine['shared_memory_free_bytes'])} free"


def _size(num_bytes: int | None, without: str = "none") -> str:
    if num_bytes is None:
        return without
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
