"""The list of tests that an extension knows to fail, one a line, each with its reason.

    test_event_measures_time        # the driver's clock has 1 s steps; ticket 1234
    test_kernel[fused_adam-...]     # one case of a test

It is the file `expected_failures.txt` beside the test file that imports the suite; `ds_conformance` takes it from
anywhere (`--ds-expected-failures` of `deepspeed.testing.recording`). The list is strict: a test that passes while it
is on it fails the run, and so does a name that the suite has not. A test that is skipped stays skipped.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.errors import ConfigError

if TYPE_CHECKING:
    import pytest

FILE_NAME = "expected_failures.txt"
OPTION = "--ds-expected-failures"


def path_of_list(config: "pytest.Config", test_file: Path) -> Path:
    """The list for the tests in `test_file`: the one of the option, else the file beside it, which may be missing."""
    given = config.getoption(OPTION, default=None)
    return test_file.with_name(FILE_NAME) if given is None else Path(given)


def unknown_names(expected: Iterable[str], tests: Iterable[str]) -> list[str]:
    """The names on a list, with cases as they stand there, that are none of `tests`."""
    known = frozenset(tests)
    return sorted(name for name in expected if name.partition("[")[0] not in known)


def read_expected_failures(path: Path) -> dict[str, str]:
    """Name of a test, with its case in brackets or without -> reason. Empty when there is no such file.

    Raises:
        ConfigError: it is no UTF-8 text, a line has no reason, or a name stands there twice.
    """
    expected: dict[str, str] = {}
    if not path.is_file():
        return expected
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    for number, line in enumerate(text.splitlines(), 1):
        name, _, reason = (part.strip() for part in line.partition("#"))
        if not name:
            continue
        if not reason:
            raise ConfigError(f"{path}, line {number}: {name} has no reason; write '{name}  # why it fails'")
        if name in expected:
            raise ConfigError(f"{path}, line {number}: {name} is there twice; keep one")
        expected[name] = reason
    return expected
