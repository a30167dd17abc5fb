"""Parts that all commands share: the parser, sizes on command lines, the console and tables.

The console and the tables use colors only on a terminal; elsewhere they do not wrap lines.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed._version import __version__

_LETTER_ALONE = re.compile(r"\s*\d+(\.\d+)?\s*[KMGTkmgt]")
_UNFOLDED = 10_000  # columns; a table uses only the width of its longest cells
# Styles of cells that name a state. rich omits colors if the output is no terminal, or NO_COLOR is set.
_STYLES = {
    **dict.fromkeys(("available", "active", "prebuilt", "cached", "passed", "whole"), "green"),
    **dict.fromkeys(("absent", "blocked", "not built", "missing", "no index"), "yellow"),
    **dict.fromkeys(("broken", "failed", "damaged"), "bold red"),
}


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Create a parser with `--version`. Each command calls it once."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"{program} {__version__}", help="print the version")
    return parser


def size_bytes(text: str) -> int:
    """Parse a size on a command line, and return it in bytes.

    Units are those of pydantic's `ByteSize`: 80GiB is binary, 80GB decimal. A single letter is binary, like in
    DeepSpeed's `ds_io`: 500M is 500MiB.

    Raises:
        argparse.ArgumentTypeError: the text is no size, or is less than a byte.
    """
    try:
        size = TypeAdapter(ByteSize).validate_python(f"{text}iB" if _LETTER_ALONE.fullmatch(text) else text)
    except ValidationError:
        size = ByteSize(0)
    if size < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a size such as 80GiB, 80GB, 500M or 4096")
    return int(size)


def size_with_unit(text: str) -> int:
    """Parse a size like `size_bytes`, but refuse a plain number, whose unit was probably forgotten."""
    if text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r} without a unit; give for example {text.strip()}GiB")
    return size_bytes(text)


@contextlib.contextmanager
def answer_stream() -> Iterator[TextIO]:
    """Yield the stream for a command's JSON. Inside the block, output to file descriptor 1 goes to stderr.

    Native libraries print to stdout: gloo in torch 2.10 prints a line for each process group.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            yield answer
        finally:
            sys.stdout.flush()
            answer.flush()
            os.dup2(answer.fileno(), 1)


def make_console() -> Console:
    """Create a console on the current stdout, once per command. `COLUMNS` sets the width outside of a terminal."""
    wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(soft_wrap=False, width=_UNFOLDED if wide else None)


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Create a table of plain text: brackets in a cell are no markup. A cell that names a state is colored."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
