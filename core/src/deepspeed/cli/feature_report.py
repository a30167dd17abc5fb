"""The part of `ds_report` on feature plugins: which are installed, what they add, which are broken."""

import traceback
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from deepspeed.cli.choice_report import show_tracebacks
from deepspeed.cli.console import make_table
from deepspeed.errors import PluginError
from deepspeed.plugins import FEATURES, plugin_manager
from deepspeed.plugins.admission import named

_COLUMNS = ("name", "state", "hooks", "reason")


def collect_features() -> list[dict[str, Any]]:
    """One row per feature plugin that is installed or that `DS_PLUGINS` names. Imports them, as the first engine does.

    Keys: `name`, `origin` (package, version, module), `state` ("active", "broken", "blocked"), `hooks` (what it
    implements), `reason` (why it is broken or blocked, else ""), `traceback` (for "broken", else None).
    """
    manager = plugin_manager()
    asked_for = set(named()) - set(manager.names())
    return [_row(name) for name in sorted(asked_for.union(manager.names(FEATURES)))]


def show_features(rows: Sequence[dict[str, Any]], console: Console, verbose: bool) -> None:
    """Print the rows; `verbose` adds origins and tracebacks."""
    if not rows:
        console.print("Feature plugins: none", markup=False)
        return
    columns = (*_COLUMNS, "origin") if verbose else _COLUMNS
    shown = ({**row, "hooks": ", ".join(row["hooks"])} for row in rows)
    console.print(make_table("Feature plugins", columns, ([row[column] for column in columns] for row in shown)))
    if verbose:
        show_tracebacks(rows, console)


def _row(name: str) -> dict[str, Any]:
    manager = plugin_manager()
    state, reason, trace = "active", "", None
    if refused := manager.refusal(name, FEATURES):
        state, reason = "blocked", refused
    else:
        try:
            manager.load(name, FEATURES)
        except PluginError as error:
            state, reason = "broken", str(error)
            trace = "".join(traceback.format_exception(error)).rstrip()
    return {
        "name": name,
        "origin": manager.origin(name, FEATURES),
        "state": state,
        "hooks": manager.hooks_of(name, FEATURES),
        "reason": reason,
        "traceback": trace,
    }
