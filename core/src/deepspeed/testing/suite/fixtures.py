"""Fixtures for the tests of the suite: the watched accelerator, and the state of the process, restored after each test.

`on_ranks` runs tests of communication and training on ranks that use the current accelerator. The ranks connect through
the accelerator's own library (`deepspeed.testing.distributed` reads `DS_ACCELERATOR`). Each rank uses the device of its
local rank.

This module also reads an extension's list of expected failures, one test per line with its reason:

    test_event_measures_time        # the driver's clock has 1 s steps; ticket 1234
    test_kernel[fused_adam-...]     # one case of a test

The list is the file `expected_failures.txt` beside the test file that imports the suite; `ds_conformance` accepts any
path (`--ds-expected-failures` of `deepspeed.testing.recording`). The list is strict: a listed test that passes fails
the run, and so does a name that is not in the suite. A skipped test stays skipped.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.accelerator.current import PLAIN, VARIABLE, explain
from deepspeed.errors import ConfigError, DeepSpeedError
from deepspeed.testing import requirements
from deepspeed.testing.distributed import run_ranks

FILE_NAME = "expected_failures.txt"
OPTION = "--ds-expected-failures"

_CANNOT_RUN = 2  # `ds_conformance` exits with the same code

#: documented methods that tests of this process used; the report lists the unused ones
ASKED: set[str] = set()


class Watched:
    """Wraps the accelerator and records each documented name that a test uses. Internal calls do not count."""

    def __init__(self, accelerator: DeepSpeedAccelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name in _DOCUMENTED:
            ASKED.add(name)
        return getattr(self._accelerator, name)

    def __repr__(self) -> str:
        return type(self._accelerator).__name__


_DOCUMENTED = frozenset(documented_names())


@pytest.fixture
def accelerator() -> DeepSpeedAccelerator:
    """Return the current accelerator, wrapped in a `Watched`. For comparisons by identity, use `get_accelerator()`."""
    return cast(DeepSpeedAccelerator, Watched(get_accelerator()))


@pytest.fixture
def device() -> torch.device:
    """Return the current device of the current accelerator."""
    return torch.device(get_accelerator().current_device_name())


def accelerator_or_end() -> DeepSpeedAccelerator:
    """Return the current accelerator. End the session if there is none, because every test would fail."""
    try:
        return get_accelerator()
    except DeepSpeedError as error:
        reason = (
            f"the conformance suite has no accelerator to ask. {error}. Run it where the device is, or run the other "
            "tests alone: pytest --ignore with the file that imports deepspeed.testing.suite"
        )
        pytest.exit(reason, returncode=_CANNOT_RUN)


@pytest.fixture(autouse=True)
def ds_undisturbed() -> Iterator[None]:
    """Restore random states and the current device after each test, and wait for the device's work."""
    accelerator = accelerator_or_end()
    before = accelerator.current_device()
    host, python = torch.get_rng_state(), random.getstate()
    state = accelerator.get_rng_state()
    yield
    torch.set_rng_state(host)  # the host first: a device that was lost in a test may raise
    random.setstate(python)
    accelerator.synchronize()
    accelerator.set_device(before)
    accelerator.set_rng_state(state)


@pytest.fixture(autouse=True)
def ds_expected_failure(request: pytest.FixtureRequest) -> None:
    """Mark a test on the list (`path_of_list`) as a strict expected failure: if the test passes, the run fails."""
    expected = read_expected_failures(path_of_list(request.config, Path(request.path)))
    reason = expected.get(request.node.name) or expected.get(request.node.originalname)
    if reason is not None:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))


def path_of_list(config: pytest.Config, test_file: Path) -> Path:
    """Return the path from the option, or else of the list beside `test_file`, which may not exist."""
    given = config.getoption(OPTION, default=None)
    return test_file.with_name(FILE_NAME) if given is None else Path(given)


def unknown_names(expected: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the names in `expected`, with their cases, that are not tests in `tests`."""
    known = frozenset(tests)
    return sorted(name for name in expected if name.partition("[")[0] not in known)


def read_expected_failures(path: Path) -> dict[str, str]:
    """Return test name, with or without a case in brackets -> reason; {} if the file does not exist.

    Raises:
        ConfigError: the file is not UTF-8, a line has no reason, or a name occurs twice.
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


# long, because a first kernel or a first context may be slow
_TIMEOUT_S = 300.0


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks, and return the results by rank. Skip the test if that is impossible."""
    (requirements.two_ranks if world_size > 1 else requirements.ranks).check()
    return run_ranks(world_size, fn, *args, timeout_s=_TIMEOUT_S, environment={VARIABLE: explain().plugin or PLAIN})


def most_ranks() -> int:
    """Return 2, or 1 if two ranks are not possible."""
    return 1 if requirements.two_ranks.unmet() else 2
