"""The part of `ds_report` on the choice of the accelerator: every candidate, who won, why, and what failed.

`ds_report --explain-accelerator` shows this part alone; `report.py` puts it among the others.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed.accelerator.candidates import list_candidates
from deepspeed.accelerator.current import PLAIN, VARIABLE, AcceleratorChoice, explain
from deepspeed.cli.console import make_table
from deepspeed.errors import DeepSpeedError
from deepspeed.plugins.admission import AUTOLOAD_VARIABLE, BLOCK_VARIABLE, NAMES_VARIABLE
from deepspeed.plugins.probing import TIMEOUT_VARIABLE

_VARIABLES = (VARIABLE, BLOCK_VARIABLE, AUTOLOAD_VARIABLE, NAMES_VARIABLE, TIMEOUT_VARIABLE)


def collect_choice() -> dict[str, Any]:
    """The choice as plain values; it is made now if none was.

    Keys: `chosen` (name, class, plugin, why, or error), `accelerators` (fields of `Candidate`, likeliest first, the
    plain device last), `environment` (the variables that decide -> value or None).
    """
    choice, error = None, None
    try:
        choice = explain()
    except DeepSpeedError as failure:
        error = str(failure)
    try:
        rows = [dataclasses.asdict(each) for each in list_candidates(choice)]  # after the choice, which may break one
    except DeepSpeedError as failure:  # a variable that holds nonsense
        rows, error = [], str(failure)
    return {
        "chosen": _chosen(choice, error),
        "accelerators": rows,
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
    }


def show_choice(report: dict[str, Any], console: Console, verbose: bool) -> None:
    """Print what `collect_choice` found, as one part of the whole report; `verbose` adds origins and tracebacks."""
    console.print(_table(report["accelerators"], verbose))
    _show_chosen(report["chosen"], console)
    if verbose:
        show_tracebacks(report["accelerators"], console)


def show_explanation(report: dict[str, Any], console: Console, verbose: bool) -> None:
    """Print all of it: each candidate with its verdict, the rules, and what was chosen; `verbose` adds tracebacks."""
    for row in report["accelerators"]:
        mark, priority = (
            "*" if row["chosen"] else " ",
            "" if row["priority"] is None else f", priority {row['priority']}",
        )
        console.print(f"{mark} {row['name']}: {row['state']}{priority}", style="bold", markup=False)
        api = f", for plugin API {row['api']}" if row["api"] else ""
        poses = [f"poses as torch's device {row['impersonates']!r}"] if row["impersonates"] else []
        for line in (row["reason"], *poses, row["verdict"], f"from {row['origin']}{api}"):
            console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    _show_rules(report["environment"], console)
    _show_chosen(report["chosen"], console)
    if verbose:
        show_tracebacks(report["accelerators"], console)
    elif any(row["traceback"] for row in report["accelerators"]):
        console.print("--verbose shows the traceback of each that is broken.", markup=False)


def show_tracebacks(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print where each broken plugin failed."""
    for row in rows:
        if row["traceback"]:
            console.print(f"\n{row['name']} failed:", style="bold", markup=False)
            console.print(row["traceback"], markup=False, highlight=False, soft_wrap=True)


def _chosen(choice: AcceleratorChoice | None, error: str | None) -> dict[str, Any]:
    if choice is None:
        return {"name": None, "class": None, "plugin": None, "why": None, "error": error}
    kind = type(choice.accelerator)
    return {
        "name": choice.accelerator._name,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "plugin": choice.plugin,
        "why": choice.why,
        "error": error,
    }


def _table(rows: Sequence[dict[str, Any]], verbose: bool) -> Table:
    columns = ("name", "priority", "state", "reason", *(["origin"] if verbose else []))
    shown = ({**row, "name": _shown_name(row)} for row in rows)
    cells = (["" if row[column] is None else str(row[column]) for column in columns] for row in shown)
    return make_table("Accelerators offered (* chosen)", columns, cells)


def _shown_name(row: dict[str, Any]) -> str:
    poses = f" (as {row['impersonates']})" if row["impersonates"] else ""
    return f"{row['name']}{poses}{' *' if row['chosen'] else ''}"


def _show_chosen(chosen: dict[str, Any], console: Console) -> None:
    if chosen["error"]:
        console.print(f"No accelerator: {chosen['error']}", style="bold red", markup=False)
    else:
        console.print(f"Chosen: {chosen['name']} ({chosen['class']}): {chosen['why']}", style="bold", markup=False)


def _show_rules(environment: dict[str, Any], console: Console) -> None:
    console.print(
        f"set_accelerator(...) beats {VARIABLE}, which beats the highest available priority, which beats {PLAIN!r}.",
        markup=False,
    )
    for name, value in environment.items():
        if value or name == VARIABLE:
            console.print(f"{name}: {value or f'not set ({PLAIN} asks for the device without plugin)'}", markup=False)
