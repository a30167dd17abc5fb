"""Entry points: the announcements of installed plugins, read with the `importlib_metadata` package.

Used by `manager.py`. An entry point has `name`, `value` (the module), `dist` (the distribution, or None) and `load()`.
"""

import difflib
from typing import Any

import importlib_metadata

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


def missing(name: str, group: str, installed: list[str]) -> str:
    """The message for a name that nobody announces."""
    close = difflib.get_close_matches(name, installed, n=1)
    hint = f"did you mean {close[0]!r}? Otherwise: " if close else ""
    return (
        f"no {KINDS[group]} named {name!r} is installed; installed: {', '.join(installed) or 'none'}; "
        f"{hint}install the package that announces it (entry-point group {group!r}; this project calls its own "
        "ds-ext-<device>)"
    )
