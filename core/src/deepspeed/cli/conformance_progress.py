"""How far `ds_conformance` is: a bar on a terminal, one plain line per finished theme elsewhere. Written to stderr.

Reads what `deepspeed.testing.recording` writes to the file descriptor of `--ds-progress`: one JSON object a line, first
`{"themes": {theme: number of tests}}`, then `{"theme": ..., "outcome": ...}` as each test ends.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepspeed.cli.conformance_report import counted

Event = dict[str, Any]


def follow(lines: Iterable[str], console: Console) -> None:
    """Show progress until `lines` end, which may be before the first one."""
    events = map(json.loads, lines)
    first = next(events, None)
    if first is not None:
        show = _show_bar if console.is_terminal else _show_lines
        show(first["themes"], events, console)


def _show_bar(sizes: dict[str, int], events: Iterator[Event], console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(sizes.values()))
        for event in events:
            bar.update(task, advance=1, description=event["theme"])


def _show_lines(sizes: dict[str, int], events: Iterator[Event], console: Console) -> None:
    outcomes = {theme: Counter[str]() for theme in sizes}
    for event in events:
        counts = outcomes[event["theme"]]
        counts[event["outcome"]] += 1
        if counts.total() == sizes[event["theme"]]:
            console.print(f"{event['theme']}: {counted(counts)}", markup=False, highlight=False, soft_wrap=True)
