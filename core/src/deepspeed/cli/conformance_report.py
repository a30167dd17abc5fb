"""The output of `ds_conformance`: its progress, tables for people, a Markdown page for a vendor's site.

The tables show the plain values that `deepspeed.testing.recording` wrote. `follow` reads what it writes meanwhile to
the file descriptor of `--ds-progress`: one JSON object a line, first `{"themes": {theme: number of tests}}`, then
`{"theme": ..., "outcome": ...}` as each test ends. It shows a bar on a terminal, one plain line per finished theme
elsewhere, on stderr.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepspeed.cli.console import make_table

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


Record = dict[str, Any]
_LEFT_OUT = ("theme", "tests", "which")
_OUTCOMES = ("passed", "failed", "error", "skipped", "expected")


def show(record: Record, console: Console) -> None:
    """Print the report: capabilities, tests by theme, why tests were skipped, what failed, one line in conclusion."""
    about = record["accelerator"]
    console.print(make_table("Capabilities", ("what", "has it", "why not"), _capability_rows(record)))
    console.print(make_table("Tests", ("theme", *_OUTCOMES), theme_rows(record)))
    if record["left out"]:
        console.print(make_table("Left out", _LEFT_OUT, left_out_rows(record)))
    for title, rows in (("Skipped", skip_rows(record)), ("Expected failures", outcome_rows(record, "expected"))):
        if rows:
            console.print(make_table(title, ("tests", "reason"), rows))
    for name, reason in failure_rows(record):
        console.print(f"FAILED {name}: {reason}", style="red", markup=False, soft_wrap=True)
    console.print(f"{about['class']} ({about['origin']}) on {about['device']}: {conclusion(record)}", markup=False)


def as_markdown(record: Record) -> str:
    """The report as a page."""
    about = record["accelerator"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    asked, not_asked = (record["methods"][key] for key in ("asked", "not asked"))
    parts = [
        f"# Conformance of {about['class']}\n\n{conclusion(record)}\n",
        f"{about['origin']}, device `{about['device']}`; {versions}.\n",
        _section("Capabilities", ("what", "has it", "why not"), _capability_rows(record)),
        _section("Ops", ("op", "from", "builder", "why not from a better place"), record["ops"]),
        _section("Tests", ("theme", *_OUTCOMES), theme_rows(record)),
        _section("Left out", _LEFT_OUT, left_out_rows(record)),
        _section("Failures", ("test", "how"), failure_rows(record)),
        _section("Expected failures", ("test", "reason"), outcome_rows(record, "expected")),
        _section("Skipped", ("tests", "reason"), skip_rows(record)),
        f"## Methods\n\n{len(asked)} of {len(asked) + len(not_asked)} documented methods were asked"
        + (f"; not: {', '.join(not_asked)}.\n" if not_asked else ".\n"),
    ]
    return "\n".join(filter(None, parts))


def conclusion(record: Record) -> str:
    """The whole in one line: "does not conform", "partial" where tests were left out, else "conforms"."""
    counts = Counter(test["outcome"] for test in record["tests"])
    number = len(record["left out"])
    verdict = "partial" if number else "conforms"
    if counts["failed"] or counts["error"]:
        verdict = "does not conform"
    left_out = f"; {number} {'test was' if number == 1 else 'tests were'} left out" if number else ""
    return f"{verdict}: {counted(counts) or 'no test was run'}{left_out}"


def counted(counts: Counter[str]) -> str:
    """Outcomes with their numbers, as "3 passed, 2 skipped"."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])


def theme_rows(record: Record) -> list[list[str]]:
    """Return a row per theme, in the order of the run: its name, and how many tests came to each outcome, "" for 0."""
    themes: dict[str, Counter[str]] = {}
    for test in record["tests"]:
        themes.setdefault(test["theme"], Counter())[test["outcome"]] += 1
    return [[theme, *(str(counts[each] or "") for each in _OUTCOMES)] for theme, counts in themes.items()]


def left_out_rows(record: Record) -> list[list[str]]:
    """Theme, number and names of the tests that `-k` left out, in the order of the suite; cases of one test count."""
    themes: dict[str, list[str]] = {}
    for name, theme in record["left out"]:
        themes.setdefault(theme, []).append(name)
    run = {test["theme"] for test in record["tests"]}
    return [
        [theme, str(len(names)), _named(names) if theme in run else "the whole theme"]
        for theme, names in themes.items()
    ]


def _named(names: Iterable[str]) -> str:
    cases = Counter(name.partition("[")[0] for name in names)
    return ", ".join(name if count == 1 else f"{name} ({count} cases)" for name, count in cases.items())


def skip_rows(record: Record) -> list[list[str]]:
    """Each reason once, with how many tests it kept from running, the most first."""
    reasons = Counter(test["reason"] for test in record["tests"] if test["outcome"] == "skipped")
    return [[str(count), reason] for reason, count in reasons.most_common()]


def outcome_rows(record: Record, *outcomes: str) -> list[list[str]]:
    """Name and reason of the tests that came to one of `outcomes`."""
    return [[test["name"], test["reason"]] for test in record["tests"] if test["outcome"] in outcomes]


def failure_rows(record: Record) -> list[list[str]]:
    """Name and last line of what failed."""
    return outcome_rows(record, "failed", "error")


def _capability_rows(record: Record) -> list[list[str]]:
    return [[name, "yes" if has else "no", reason] for name, has, reason in record["capabilities"]]


def _section(title: str, columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    """A titled Markdown table; "" without rows."""
    lines = [_markdown_row(row) for row in rows]
    if not lines:
        return ""
    head = list(columns)
    return "\n".join([f"## {title}\n", _markdown_row(head), _markdown_row(["---"] * len(head)), *lines, ""])


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_cells(cells)) + " |"


def _cells(cells: Iterable[str]) -> Iterator[str]:
    for cell in cells:
        yield " ".join(cell.split()).replace("|", "\\|")
