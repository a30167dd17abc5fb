"""The list of tests that an extension knows to fail, one a line, each with its reason.

    test_event_measures_time        # the driver's clock has 1 s steps; ticket 1234
    test_kernel[fused_adam-...]     # one case of a test

It is the file `expected_failures.txt` beside the test file that imports the suite; `ds_conformance` takes it from
anywhere. The list is strict: a test that passes while it is on it fails the run, and so does a name that the suite has
not. A test that is skipped stays skipped.
"""

from pathlib import Path

from deepspeed.errors import ConfigError

FILE_NAME = "expected_failures.txt"


def read_expected_failures(path: Path) -> dict[str, str]:
    """Name of a test, with its case in brackets or without -> reason. Empty when there is no such file.

    Raises:
        ConfigError: a line has no reason, or a name stands there twice.
    """
    expected: dict[str, str] = {}
    if not path.is_file():
        return expected
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, _, reason = (part.strip() for part in line.partition("#"))
        if not name:
            continue
        if not reason:
            raise ConfigError(f"{path}, line {number}: {name} has no reason; write '{name}  # why it fails'")
        if name in expected:
            raise ConfigError(f"{path}, line {number}: {name} is there twice; keep one")
        expected[name] = reason
    return expected
