"""Entry points: the announcements of installed plugins, read with `importlib_metadata`, and the import of one of them.

Used by `manager.py`. An entry point has `name`, `value` (the module), `dist` (the distribution, or None) and `load()`.
"""

import difflib
import re
from typing import Any

import importlib_metadata

from deepspeed._installation import pip_install
from deepspeed.errors import PluginError, counted, shown
from deepspeed.plugins.admission import PLAIN
from deepspeed.plugins.probing import IMPORT_TIMEOUT_VARIABLE, call_with_limit, is_being_imported

ACCELERATORS = "deepspeed.accelerators"
FEATURES = "deepspeed.plugins"

KINDS = {ACCELERATORS: "accelerator", FEATURES: "plugin"}


def read_entry_points(group: str) -> list[Any]:
    """The entry points of `group` in this environment, by name; no plugin is imported. Called once per group."""
    return sorted(importlib_metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def distribution_of(entry: Any) -> str:
    """Name and version of the package that announces `entry`, for messages."""
    dist = getattr(entry, "dist", None)
    return f"{dist.metadata['Name']} {dist.version}" if dist is not None else "an unnamed distribution"


def import_plugin(name: str, group: str, announced: list[Any], seconds: float, lock: object) -> object:
    """The plugin called `name` among the entry points `announced` in `group`. Called once per plugin.

    Args:
        seconds: a limit on the import, which runs in a thread of its own, unless the caller is inside the import of
            that package.
        lock: the manager's, which the caller holds: a feature plugin may use the manager while it is imported.

    Raises:
        PluginError: none has the name, or several, or the import failed.
    """
    entries = {entry.value: entry for entry in announced if entry.name == name}
    if not entries:
        raise PluginError(_missing(name, group, sorted({entry.name for entry in announced})))
    if len(entries) > 1:
        where = ", ".join(f"{entry.value} ({distribution_of(entry)})" for entry in entries.values())
        raise PluginError(
            f"{KINDS[group]} {name!r} is announced by {counted(len(entries), 'package')}: {where}; keep one"
        )
    (entry,) = entries.values()
    try:
        if is_being_imported(entry.value):
            return entry.load()
        if group == ACCELERATORS:
            return call_with_limit(entry.load, seconds, f"import of {name}")
        return call_with_limit(entry.load, seconds, f"import of {name}", IMPORT_TIMEOUT_VARIABLE, lock)
    except (Exception, SystemExit) as error:  # some packages end the process when their driver is missing
        label = f"{KINDS[group]} {name!r} of {distribution_of(entry)}"
        raise PluginError(f"{label} cannot be imported from {entry.value}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Type and text of what a plugin raised, for a message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _missing(name: str, group: str, installed: list[str]) -> str:
    """The message for a name that no installed package announces."""
    found = f"no {KINDS[group]} named {shown(name)} is installed; installed: {', '.join(installed) or 'none'}; "
    to_install = _own_extensions() if group == ACCELERATORS else {}
    if name in to_install:
        return f"{found}{pip_install(to_install[name])}"
    names = [*installed, *to_install, *([PLAIN] if group == ACCELERATORS else [])]
    lowered = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    hint = ""
    if close:
        meant = lowered[close[0]]
        remedy = f" ({pip_install(to_install[meant])})" if meant in to_install and meant not in installed else ""
        hint = f"did you mean {meant!r}{remedy}? Otherwise: "
    return (
        f"{found}{hint}install the package that announces it (entry-point group {group!r}; this project calls its own "
        "ds-ext-<device>)"
    )


def _own_extensions() -> dict[str, str]:
    """Device name -> the distribution that brings it, from the extras of ds-core; empty when ds-core is not installed.

    Only its metadata names devices: no module of the core does.
    """
    try:
        required = importlib_metadata.requires("ds-core") or []
    except importlib_metadata.PackageNotFoundError:
        return {}
    matches = [re.match(r"ds-ext-(\w+)", requirement) for requirement in required]
    return {match[1]: match[0] for match in matches if match}
