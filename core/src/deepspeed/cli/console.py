"""The console of the commands that show tables: as wide as the terminal, or so wide that nothing is folded."""

import os
import sys

from rich.console import Console

_UNFOLDED = 10_000  # columns; a table takes only what its longest cells need


def make_console() -> Console:
    """A console on today's stdout. Called once by each command; `COLUMNS` decides where stdout is no terminal."""
    wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(soft_wrap=False, width=_UNFOLDED if wide else None)
