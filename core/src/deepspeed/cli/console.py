"""The console and the tables of the commands: colors on a terminal only, and no folded lines elsewhere."""

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNFOLDED = 10_000  # columns; a table takes only what its longest cells need
# Cells that say in what state something is. rich omits colors where the output is no terminal, or NO_COLOR is set.
_STYLES = {
    **dict.fromkeys(("available", "active", "prebuilt", "cached", "passed", "whole"), "green"),
    **dict.fromkeys(("absent", "blocked", "not built", "missing", "no index"), "yellow"),
    **dict.fromkeys(("broken", "failed", "damaged"), "bold red"),
}


def make_console() -> Console:
    """A console on today's stdout. Called once by each command; `COLUMNS` decides where stdout is no terminal."""
    wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(soft_wrap=False, width=_UNFOLDED if wide else None)


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of plain text: brackets in a cell are no markup. A cell that names a state has its color."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
