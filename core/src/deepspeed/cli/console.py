"""The commands share a parser, the reading of sizes on their command lines, a console and tables.

The console and the tables have colors on a terminal only, and no folded lines elsewhere.
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
_UNFOLDED = 10_000  # columns; a table takes only what its longest cells need
# Cells that say in what state something is. rich omits colors where the output is no terminal, or NO_COLOR is set.
_STYLES = {
    **dict.fromkeys(("available", "active", "prebuilt", "cached", "passed", "whole"), "green"),
    **dict.fromkeys(("absent", "blocked", "not built", "missing", "no index"), "yellow"),
    **dict.fromkeys(("broken", "failed", "damaged"), "bold red"),
}


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser that knows `--version`. Called once by each command."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"{program} {__version__}", help="print the version")
    return parser


def size_bytes(text: str) -> int:
    """The bytes of a size on a command line.

    Units are those of pydantic's `ByteSize`: 80GiB is binary, 80GB decimal. A letter alone is binary, as DeepSpeed's
    `ds_io` has it: 500M is 500MiB.

    Raises:
        argparse.ArgumentTypeError: the text is no size, or less than a byte.
    """
    try:
        size = TypeAdapter(ByteSize).validate_python(f"{text}iB" if _LETTER_ALONE.fullmatch(text) else text)
    except ValidationError:
        size = ByteSize(0)
    if size < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a size such as 80GiB, 80GB, 500M or 4096")
    return int(size)


def size_with_unit(text: str) -> int:
    """`size_bytes`, where a plain number is more likely a forgotten unit than a number of bytes."""
    if text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r} without a unit; give for example {text.strip()}GiB")
    return size_bytes(text)


@contextlib.contextmanager
def answer_stream() -> Iterator[TextIO]:
    """Give the stream for a command's JSON, and send to stderr what libraries print below Python meanwhile.

    The gloo of torch 2.10 prints a line to standard output for each process group.
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
