"""A pytest plugin that records a run of the conformance suite: `-p deepspeed.testing.recording --ds-record F.json`.

`--ds-expected-failures F` names the list of expected failures, if it is not the file beside the tests. `--ds-progress
FD` writes the number of tests to that file descriptor, then a line at the end of each test. `--ds-level N` sets the
requested level; the levels up to it are judged.

`ds_conformance` runs pytest with this plugin and shows the record; a vendor's CI may do the same. The file:

    format        number of the form of this file: 2 has levels
    accelerator   name, class, module, plugin, origin (package and version), device, why it was chosen
    versions      python, torch, ds-core, plugin API, and the platform
    capabilities  [name, has it, reason why not]: `requirements.ALL`
    ops           [op, source, builder, reason]: where each op that somebody calls comes from
    level         asked; reached (0: none; null: tests were left out, so that none was judged); levels, by number:
                  name, verdict (passed, failed, lacking, partial), counts of passed, failed, skipped and expected
                  tests, the needed tests that did not pass, and what was measured
    tests         [name, theme, level, outcome, seconds, reason, and figures where it measured some]; outcome is passed,
                  failed, error, skipped or expected (failed as the list of expected failures says); the reason of a
                  failure is its message, in one line
    left out      [name, theme] of the tests that `-k` kept from running
    methods       documented methods of the accelerator that tests asked for, and those that none did
"""

import itertools
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed._version import CORE_VERSION
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.accelerator.current import explain
from deepspeed.errors import ConfigError, DeepSpeedError
from deepspeed.ops import registry
from deepspeed.ops.documented import OPS
from deepspeed.plugins import PLUGIN_API, plugin_manager
from deepspeed.testing import requirements, suite
from deepspeed.testing.suite.fixtures import ASKED, OPTION, path_of_list, read_expected_failures, unknown_names

_OPTION = "--ds-record"
_PROGRESS = "--ds-progress"
_LEVEL = "--ds-level"
#: version of the record; grows when a key changes its meaning or is removed
FORMAT = 2
#: the header that `deepspeed.testing.distributed` writes before the text of each failed rank
_OF_RANK = re.compile(r"^(?=.*\[rank \d+ of \d+\] )", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--ds-record`, `--ds-progress`, `--ds-level` and `--ds-expected-failures`."""
    parser.addoption(_OPTION, metavar="FILE", help="write the run of the conformance suite to FILE, as JSON")
    parser.addoption(_PROGRESS, metavar="FD", type=int, help="write a line to this file descriptor as each test ends")
    parser.addoption(_LEVEL, metavar="N", type=int, default=suite.DEFAULT_LEVEL, help="judge the levels up to this one")
    parser.addoption(OPTION, metavar="FILE", help="the tests that are known to fail, one a line, with '# reason'")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the accelerator and reads the list, so that an error is reported once, not by each test."""
    path = config.getoption(_OPTION)
    if path is None:
        return
    try:
        get_accelerator()
        for argument in config.args:
            _check_list(path_of_list(config, Path(argument)))
    except DeepSpeedError as error:
        raise pytest.UsageError(str(error)) from error
    if (progress := config.getoption(_PROGRESS)) is not None:
        os.set_inheritable(progress, False)  # the reader waits for its end, so test processes must not keep it open
    config.pluginmanager.register(Recorder(Path(path), progress, config.getoption(_LEVEL)), "ds-recorder")


def _check_list(path: Path) -> None:
    """Check the whole list, whichever tests are chosen.

    Raises:
        ConfigError: the list cannot be read, or names a test that is not in the suite.
    """
    expected = read_expected_failures(path)
    if expected:
        unknown = unknown_names(expected, suite.all_tests())
        if unknown:
            raise ConfigError(f"{path} names no tests of the suite: {', '.join(unknown)}; remove or rename them")


class Recorder:
    """Collects the outcome of each test; registered for one run of pytest.

    Args:
        path: file for the record; None: the caller reads `tests` instead.
        progress_fd: file descriptor for the progress, as lines of JSON; None: no progress.
        level: the requested level.
    """

    def __init__(
        self, path: Path | None = None, progress_fd: int | None = None, level: int = suite.DEFAULT_LEVEL
    ) -> None:
        self._path = path
        self._level = level
        self._progress_fd = progress_fd
        self._themes: dict[str, str] = {}
        self._left_out: list[list[str]] = []
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Notes the theme of a test, and makes it a keyword for `-k`."""
        module = getattr(getattr(item, "function", None), "__module__", "")
        theme = module.rpartition(".")[2].removeprefix("test_")
        self._themes[item.nodeid] = theme
        item.extra_keyword_matches.add(theme)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Notes the tests that `-k` leaves out."""
        self._left_out += [[_name(item.nodeid), self._themes[item.nodeid]] for item in items]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Writes the number of tests per theme."""
        self._write_progress({"themes": Counter(self._themes[item.nodeid] for item in session.items)})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Writes the outcome of a test that has ended."""
        self._write_progress({each: self.tests[nodeid][each] for each in ("theme", "outcome")})

    def _write_progress(self, event: dict[str, Any]) -> None:
        if self._progress_fd is not None:
            os.write(self._progress_fd, (json.dumps(event) + "\n").encode())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst outcome of setup, call and teardown."""
        name, theme = _name(report.nodeid), self._themes.get(report.nodeid, "")
        about = {"name": name, "theme": theme, "level": suite.level_of(name, theme)}
        test = self.tests.setdefault(report.nodeid, {**about, "outcome": "", "seconds": 0.0, "reason": ""})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        outcome = _outcome(report)
        if outcome is not None and test["outcome"] not in ("failed", "error"):
            test["outcome"], test["reason"] = outcome, _reason(report)
        if report.when == "call" and (figures := [value for name, value in report.user_properties if name == "figure"]):
            test["figures"] = figures

    def pytest_sessionfinish(self) -> None:
        """Writes the record."""
        if self._path is not None:
            tests = list(self.tests.values())
            level = judge(tests, self._level, bool(self._left_out))
            record = {**describe(), "level": level, "tests": tests, "left out": self._left_out}
            self._path.write_text(json.dumps(record, indent=1) + "\n")


def judge(tests: Sequence[Mapping[str, Any]], asked: int, is_partial: bool) -> dict[str, Any]:
    """Judge the levels up to `asked`. A level is reached if it and all levels below have passed.

    A level passes if at least one of its tests and all its needed tests (`suite.NEEDED`) passed, and none failed, not
    even as expected. Tests that are skipped, because the accelerator lacks a capability, do not count.

    Args:
        tests: tests of the record.
        asked: the highest level to judge.
        is_partial: whether some tests were left out, so that no level can be reached.
    """
    levels = {str(level): _verdict(tests, level, is_partial) for level in suite.LEVELS if level <= asked}
    steps = itertools.takewhile(lambda about: about["verdict"] == "passed", levels.values())
    return {"reached": None if is_partial else len(list(steps)), "asked": asked, "levels": levels}


def _verdict(tests: Sequence[Mapping[str, Any]], level: int, is_partial: bool) -> dict[str, Any]:
    own = [test for test in tests if test["level"] == level]
    counts = Counter("failed" if test["outcome"] == "error" else test["outcome"] for test in own)
    passed = {test["name"].partition("[")[0] for test in own if test["outcome"] == "passed"}
    lacking = [name for name in suite.NEEDED[level] if name not in passed]
    verdict = "lacking" if lacking else "passed"
    if is_partial:
        verdict = "partial"
    if counts["failed"] or counts["expected"]:
        verdict = "failed"
    numbers = {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped", "expected")}
    figures = [figure for test in own for figure in test.get("figures", ())]
    return {"name": suite.LEVELS[level], "verdict": verdict, **numbers, "lacking": lacking, "figures": figures}


def describe() -> dict[str, Any]:
    """Return the record without `level`, `tests` and `left out`."""
    accelerator, choice = get_accelerator(), explain()
    documented = documented_names()
    return {
        "format": FORMAT,
        "accelerator": {
            "name": accelerator._name,
            "class": type(accelerator).__name__,
            "module": type(accelerator).__module__,
            "plugin": choice.plugin,
            "origin": "ds-core" if choice.plugin is None else plugin_manager().origin(choice.plugin),
            "device": _device_name(),
            "why": choice.why,
        },
        "versions": {
            "ds-core": CORE_VERSION,
            "plugin API": PLUGIN_API,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "capabilities": [[each.name, reason is None, reason or ""] for each, reason in _capabilities()],
        "ops": list(_ops()),
        "methods": {
            "asked": [name for name in documented if name in ASKED],
            "not asked": [name for name in documented if name not in ASKED],
        },
    }


def _capabilities() -> Iterator[tuple[requirements.Requirement, str | None]]:
    for each in requirements.ALL:
        try:
            yield each, each.unmet()
        except Exception as error:  # noqa: BLE001 - a vendor's answer, whatever it raises, and the tests say it too
            yield each, _failed(error)


def _failed(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {error}"


def _device_name() -> str:
    try:
        return get_accelerator().current_device_name()
    except Exception as error:  # noqa: BLE001 - a device that was lost in a test must not take the record along
        return _failed(error)


def _ops() -> Iterator[list[str]]:
    for name, op in OPS.items():
        if op.front:
            try:
                found = registry.resolve(name)
            except Exception as error:  # noqa: BLE001 - as above
                yield [name, "none", "", _failed(error)]
            else:
                yield [name, found.source, type(found.builder).__name__ if found.builder else "", found.why()]


def _name(nodeid: str) -> str:
    """Return the name of a test without its file."""
    return nodeid.partition("::")[2] or nodeid


def _outcome(report: pytest.TestReport) -> str | None:
    """Return the outcome of one phase of a test; None for a setup or teardown without errors."""
    if report.skipped:
        return "expected" if hasattr(report, "wasxfail") else "skipped"
    if report.failed:
        return "failed" if report.when == "call" else "error"
    return "passed" if report.when == "call" else None


def _reason(report: pytest.TestReport) -> str:
    """Return one line: why a test was skipped, why its failure is expected, or how it failed; "" if none applies."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    told: Any = report.longrepr
    if report.skipped and isinstance(told, tuple):
        return str(told[2]).removeprefix("Skipped: ")
    if not report.failed:
        return ""
    crash = getattr(told, "reprcrash", None)
    return " ".join(_without_frames(crash.message if crash is not None else str(told)).split())[:400]


def _without_frames(message: str) -> str:
    """Return a failure's message without tracebacks of ranks; only the first rank's exception is kept."""
    head, *ranks = _OF_RANK.split(message)
    before, traceback, frames = (ranks[0] if ranks else "").rpartition(_TRACEBACK)
    if not traceback:
        return message
    verdict = before.partition(_TRACEBACK)[0]
    lines = frames.splitlines()
    thrown = next((n for n, line in enumerate(lines) if line and not line[0].isspace()), 0)
    return "\n".join([head, verdict, *lines[thrown:]])
