"""`ds_conformance`: test whether an accelerator meets the core's requirements, with `deepspeed.testing.suite`.

    ds_conformance                               the accelerator that would be chosen
    ds_conformance --accelerator xyz             the installed accelerator of that name
    ds_conformance --level 1                     levels up to this one; default 2
    ds_conformance --json F --report F.md        also write JSON, and a Markdown page
    ds_conformance --badge F.svg                 the level that was reached, as a picture
    ds_conformance --expected-failures F         tests that must fail
    ds_conformance -k "memory and not peak"      some tests or themes

The suite runs in its own process, so that a crash of the accelerator ends only that process. Exit code 0 if no test
failed (with `-k` the verdict is "partial", and the report lists the tests left out); 1 if a test failed, or passed
although it is on the list of expected failures; 2 if the suite could not run.

The tables show the values that `deepspeed.testing.recording` recorded. `follow` reads its progress from the file
descriptor of `--ds-progress`: one JSON object per line, first `{"themes": {theme: number of tests}}`, then
`{"theme": ..., "outcome": ...}` when a test ends. On stderr it shows a bar on a terminal, or one line per finished
theme elsewhere.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepspeed.cli.console import make_console, make_parser, make_table
from deepspeed.errors import counted

Event = dict[str, Any]


def follow(lines: Iterable[str], console: Console) -> None:
    """Show progress until `lines` ends. It may be empty."""
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
            console.print(f"{event['theme']}: {in_words(counts)}", markup=False, highlight=False, soft_wrap=True)


Record = dict[str, Any]
_LEFT_OUT = ("theme", "tests", "which")
_LEVELS = ("level", "verdict", "passed", "failed", "skipped", "expected", "did not pass")
_FIGURES = ("what was measured", "share", "at least", "measured", "of")
_OUTCOMES = ("passed", "failed", "error", "skipped", "expected")


def show(record: Record, console: Console) -> None:
    """Print the report: capabilities, tests, levels, why tests were skipped, what failed, and the conclusion."""
    about = record["accelerator"]
    console.print(make_table("Capabilities", ("what", "has it", "why not"), _capability_rows(record)))
    console.print(make_table("Tests", ("theme", *_OUTCOMES), theme_rows(record)))
    console.print(make_table("Levels", _LEVELS, level_rows(record)))
    if figures := figure_rows(record):
        console.print(make_table("Figures", _FIGURES, figures))
    if record["left out"]:
        console.print(make_table("Left out", _LEFT_OUT, left_out_rows(record)))
    for title, rows in (("Skipped", skip_rows(record)), ("Expected failures", outcome_rows(record, "expected"))):
        if rows:
            console.print(make_table(title, ("tests", "reason"), rows))
    for name, reason in failure_rows(record):
        console.print(f"FAILED {name}: {reason}", style="red", markup=False, soft_wrap=True)
    console.print(standing(record), markup=False)
    console.print(f"{about['class']} ({about['origin']}) on {about['device']}: {conclusion(record)}", markup=False)


def as_markdown(record: Record) -> str:
    """Return the report as a Markdown page."""
    about = record["accelerator"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    asked, not_asked = (record["methods"][key] for key in ("asked", "not asked"))
    parts = [
        f"# Conformance of {about['class']}\n\n{conclusion(record)}\n",
        f"{about['origin']}, device `{about['device']}`; {versions}.\n",
        f"## Levels\n\n{standing(record)}\n",
        _section("", _LEVELS, level_rows(record)),
        _section("Figures", _FIGURES, figure_rows(record)),
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
    """Return the verdict and the counts in one line: "does not conform", "partial" (tests left out) or "conforms"."""
    counts = Counter(test["outcome"] for test in record["tests"])
    number = len(record["left out"])
    verdict = "partial" if number else "conforms"
    if counts["failed"] or counts["error"]:
        verdict = "does not conform"
    left_out = f"; {number} {'test was' if number == 1 else 'tests were'} left out" if number else ""
    return f"{verdict}: {in_words(counts) or 'no test was run'}{left_out}"


def standing(record: Record) -> str:
    """Return one line with the level that was reached, and why it is below the requested level."""
    level = record["level"]
    asked, reached = level["asked"], level["reached"]
    if reached is None:
        return f"no level is reached by a part of the suite; level {asked} was asked for"
    if reached == asked:
        return f"level {reached} is reached, as was asked for"
    stopped = level["levels"][str(reached + 1)]
    why = {
        "failed": f"{counted(stopped['failed'] + stopped['expected'], 'test')} of level {reached + 1} failed",
        "lacking": f"level {reached + 1} needs a case that passes of {', '.join(stopped['lacking'])}",
    }
    return f"{f'level {reached}' if reached else 'no level'} is reached of {asked} asked for: {why[stopped['verdict']]}"


def level_rows(record: Record) -> list[list[str]]:
    """Return a row per level up to the requested one: verdict, number of tests per outcome, and missing tests."""
    return [
        [
            f"{number} {about['name']}",
            about["verdict"],
            *(str(about[outcome] or "") for outcome in ("passed", "failed", "skipped", "expected")),
            ", ".join(about["lacking"]) if about["verdict"] == "lacking" else "",
        ]
        for number, about in record["level"]["levels"].items()
    ]


def figure_rows(record: Record) -> list[list[str]]:
    """Return a row per measured figure: the share, its threshold, and the two rates whose ratio it is."""
    return [
        [
            figure["what"],
            f"{figure['share']:.2f}",
            f"{figure['at_least']:.2f}",
            f"{figure['rate']:.3g} {figure['unit']}",
            f"{figure['device_rate']:.3g} {figure['unit']}",
        ]
        for about in record["level"]["levels"].values()
        for figure in about["figures"]
    ]


#: color of the badge's right half, by the level that was reached
_COLORS = {None: "#6b6b6b", 0: "#b3261e", 1: "#8a5a00", 2: "#1f6feb", 3: "#1a7f37", 4: "#116329"}
_LETTER = 6.6  # mean width of a letter of 11 px; `textLength` makes it exact
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{left}: {right}">
<title>{left}: {right}</title>
<clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>
<g clip-path="url(#r)"><rect width="{split}" height="20" fill="#444"/>
<rect x="{split}" width="{rest}" height="20" fill="{color}"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" lengthAdjust="spacingAndGlyphs">
<text x="6" y="14" textLength="{left_length}">{left}</text>
<text x="{right_x}" y="14" textLength="{right_length}">{right}</text></g>
</svg>
"""


def as_badge(record: Record) -> str:
    """Return the level that was reached as a small SVG: "ds-core", then "conformance L2", "none" or "partial"."""
    reached = record["level"]["reached"]
    left = "ds-core"
    right = f"conformance {'partial' if reached is None else f'L{reached}' if reached else 'none'}"
    left_length, right_length = (round(len(text) * _LETTER) for text in (left, right))
    split, rest = left_length + 12, right_length + 12
    return _SVG.format(
        **{"left": left, "right": right, "left_length": left_length, "right_length": right_length},
        **{"width": split + rest, "split": split, "rest": rest, "right_x": split + 6, "color": _COLORS[reached]},
    )


def in_words(counts: Counter[str]) -> str:
    """Return the outcomes with their counts, such as "3 passed, 2 skipped"."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])


def theme_rows(record: Record) -> list[list[str]]:
    """Return a row per theme, in the order of the run: its name, and the count of each outcome ("" for 0)."""
    themes: dict[str, Counter[str]] = {}
    for test in record["tests"]:
        themes.setdefault(test["theme"], Counter())[test["outcome"]] += 1
    return [[theme, *(str(counts[each] or "") for each in _OUTCOMES)] for theme, counts in themes.items()]


def left_out_rows(record: Record) -> list[list[str]]:
    """Return theme, number and names of the tests that `-k` left out, in the suite's order. Each case counts."""
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
    """Return the number of skipped tests and the reason, for each reason, most frequent first."""
    reasons = Counter(test["reason"] for test in record["tests"] if test["outcome"] == "skipped")
    return [[str(count), reason] for reason, count in reasons.most_common()]


def outcome_rows(record: Record, *outcomes: str) -> list[list[str]]:
    """Return name and reason of each test whose outcome is in `outcomes`."""
    return [[test["name"], test["reason"]] for test in record["tests"] if test["outcome"] in outcomes]


def failure_rows(record: Record) -> list[list[str]]:
    """Return name and last line of each failed test."""
    return outcome_rows(record, "failed", "error")


def _capability_rows(record: Record) -> list[list[str]]:
    return [[name, "yes" if has else "no", reason] for name, has, reason in record["capabilities"]]


def _section(title: str, columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, with a heading unless `title` is ""; return "" without rows."""
    lines = [_markdown_row(row) for row in rows]
    if not lines:
        return ""
    head = list(columns)
    titled = [f"## {title}\n"] if title else []
    return "\n".join([*titled, _markdown_row(head), _markdown_row(["---"] * len(head)), *lines, ""])


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_cells(cells)) + " |"


def _cells(cells: Iterable[str]) -> Iterator[str]:
    for cell in cells:
        yield " ".join(cell.split()).replace("|", "\\|")


_PASSED, _FAILED, _NOT_RUN = 0, 1, 2
# pytest's exit code if tests failed; higher codes have other causes
_PYTEST_FAILED = 1
_TEST_FILE = "from deepspeed.testing import suite\n\nglobals().update(suite.chosen({level}))\n"
_MOST, _DEFAULT = 4, 2  # of `deepspeed.testing.suite`, which imports torch


class _CannotRun(Exception):
    """The suite cannot run. `main` prints the message as one line, and returns exit code 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        for path in filter(None, (options.json, options.report, options.badge)):
            if not path.parent.is_dir():  # fail before the suite, which takes minutes
                raise _CannotRun(f"cannot write {path}: there is no folder {path.parent}")
        record, passed = _run(options)
        if options.json:
            _write(options.json, json.dumps(record, indent=1) + "\n")
        if options.report:
            _write(options.report, as_markdown(record))
        if options.badge:
            _write(options.badge, as_badge(record))
    except _CannotRun as error:
        sys.stderr.write(f"ds_conformance: {error}\n")
        return _NOT_RUN
    show(record, make_console())
    return _PASSED if passed else _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_conformance", "Prove that an accelerator works with DeepSpeed.")
    parser.add_argument("--accelerator", metavar="NAME", help="an installed one, instead of the one that is chosen")
    parser.add_argument(
        "--level",
        metavar="N",
        type=int,
        choices=range(1, _MOST + 1),
        default=_DEFAULT,
        help="ask for the levels up to this one: 1 trains, 2 numerics (the default), 3 speed, 4 survives faults",
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the record of the run as JSON")
    parser.add_argument("--report", metavar="F.md", type=Path, help="write the report as Markdown")
    parser.add_argument("--badge", metavar="F.svg", type=Path, help="write the level that was reached as a picture")
    parser.add_argument(
        "--expected-failures", metavar="F", type=Path, help="tests known to fail, one a line, with '# reason'"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose name or theme matches, as pytest's -k")
    parser.add_argument("-v", "--verbose", action="store_true", help="show pytest's own output, with tracebacks")
    return parser


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Run the suite; return the record, and whether all tests had the expected outcome."""
    if importlib.util.find_spec("pytest") is None:
        raise _CannotRun("the suite is run by pytest, which is not installed: pip install pytest")
    with tempfile.TemporaryDirectory(prefix="ds_conformance_") as name:
        folder = Path(name)
        (folder / "test_conformance.py").write_text(_TEST_FILE.format(level=options.level))
        (folder / "pytest.ini").write_text("[pytest]\n")  # ignore a pytest configuration in the working directory
        if options.expected_failures is not None:
            _check_readable(options.expected_failures)
        record = folder / "record.json"
        code, output = _pytest(folder, record, options)
        if not record.is_file() or code not in (0, _PYTEST_FAILED):
            raise _CannotRun(_what_went_wrong(code, output, options))
        return json.loads(record.read_text()), code == 0


def _pytest(folder: Path, record: Path, options: argparse.Namespace) -> tuple[int, str]:
    """Run pytest, and return its exit code and output. With `--verbose` it writes to the terminal; the output is ""."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
        *("-p", "deepspeed.testing.recording", "--ds-record", str(record), "--ds-level", str(options.level)),
        *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--import-mode=importlib"),
        *(["-k", options.k] if options.k else []),
        *(["--ds-expected-failures", str(options.expected_failures)] if options.expected_failures else []),
        str(folder / "test_conformance.py"),
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    if options.accelerator is not None:
        environment["DS_ACCELERATOR"] = options.accelerator
    if options.verbose:
        return subprocess.run(command, env=environment, check=False).returncode, ""
    return _followed(command, environment, folder / "output.txt")


def _followed(command: list[str], environment: dict[str, str], output: Path) -> tuple[int, str]:
    """Run pytest with its output in a file, and show the progress; return the exit code and the output."""
    reading, writing = os.pipe()
    command = [*command, "--ds-progress", str(writing)]
    with os.fdopen(reading, encoding="utf-8") as progress, output.open("wb") as told:
        try:
            process = subprocess.Popen(command, env=environment, stdout=told, stderr=told, pass_fds=[writing])
        finally:
            os.close(writing)
        with process:
            follow(progress, Console(stderr=True))
    return process.returncode, output.read_text(encoding="utf-8", errors="replace")


def _what_went_wrong(code: int, output: str, options: argparse.Namespace) -> str:
    """Return one line that explains why pytest failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("ERROR: ")), "")
    if told:
        return _named_by_flag(told.removeprefix("ERROR: "), options.accelerator)
    if code == 5:
        return f"no test matches -k {options.k!r}; give part of the name or theme of a test in deepspeed.testing.suite"
    if code < 0:  # the stack that faulthandler wrote names the test
        name = signal.Signals(-code).name
        at = next((found[1] for line in lines if (found := re.search(r" in (test_\w+)$", line))), "no test")
        return f"the process was ended by {name} in {at} (--verbose shows all of it)"
    if options.verbose:
        return f"pytest ended with code {code}, as shown above"
    last = lines[-1] if lines else "it said nothing"
    return f"pytest ended with code {code}: {last} (--verbose shows all of it)"


def _named_by_flag(told: str, accelerator: str | None) -> str:
    """Replace `DS_ACCELERATOR` in a message of the core with `--accelerator`, if the user gave that flag."""
    if accelerator is None:
        return told
    return told.replace(f"DS_ACCELERATOR={accelerator}", f"--accelerator {accelerator}").replace(
        "unset DS_ACCELERATOR", "omit --accelerator"
    )


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise _CannotRun(f"--expected-failures {path}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _CannotRun(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
