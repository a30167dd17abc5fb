"""The fixtures give every test of the suite the watched accelerator, and restore the state of the process after it.

`on_ranks` gives tests of communication and training ranks whose accelerator is the current one here. They join over the
accelerator's own library (`DS_ACCELERATOR` tells `deepspeed.testing.distributed` so), and each takes the device of its
local rank.

The list of tests that an extension knows to fail is read here, one a line, each with its reason:

    test_event_measures_time        # the driver's clock has 1 s steps; ticket 1234
    test_kernel[fused_adam-...]     # one case of a test

It is the file `expected_failures.txt` beside the test file that imports the suite; `ds_conformance` takes it from
anywhere (`--ds-expected-failures` of `deepspeed.testing.recording`). The list is strict: a test that passes while it
is on it fails the run, and so does a name that the suite has not. A test that is skipped stays skipped.
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

_CANNOT_RUN = 2  # the exit code of `ds_conformance` for the same

#: documented methods that a test of this process asked for; the report names those that none did
ASKED: set[str] = set()


class Watched:
    """The accelerator, and a note of each documented name that a test takes from it; what it calls itself is not."""

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
    """The current accelerator, behind a `Watched`. For what is compared by identity use `get_accelerator()`."""
    return cast(DeepSpeedAccelerator, Watched(get_accelerator()))


@pytest.fixture
def device() -> torch.device:
    """The current device of the current accelerator."""
    return torch.device(get_accelerator().current_device_name())


def accelerator_or_end() -> DeepSpeedAccelerator:
    """Return the current accelerator; end the session where there is none, since each test would fail for that."""
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
    """Put random states and the current device back after each test, and wait for the device's work."""
    accelerator = accelerator_or_end()
    before = accelerator.current_device()
    host, python = torch.get_rng_state(), random.getstate()
    state = accelerator.get_rng_state()
    yield
    torch.set_rng_state(host)  # the host's first: a device that a test lost may raise
    random.setstate(python)
    accelerator.synchronize()
    accelerator.set_device(before)
    accelerator.set_rng_state(state)


@pytest.fixture(autouse=True)
def ds_expected_failure(request: pytest.FixtureRequest) -> None:
    """A test on the list (`path_of_list`) must fail: when it passes, the list is wrong, and that fails the run."""
    expected = read_expected_failures(path_of_list(request.config, Path(request.path)))
    reason = expected.get(request.node.name) or expected.get(request.node.originalname)
    if reason is not None:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))


def path_of_list(config: pytest.Config, test_file: Path) -> Path:
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


# A first kernel or a first context may take long; nothing here depends on it.
_TIMEOUT_S = 300.0


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(*args)` on each of `world_size` ranks; their results by rank. Skips the test where there can be no ranks."""
    (requirements.two_ranks if world_size > 1 else requirements.ranks).check()
    return run_ranks(world_size, fn, *args, timeout_s=_TIMEOUT_S, environment={VARIABLE: explain().plugin or PLAIN})


def most_ranks() -> int:
    """2, or 1 where two ranks cannot be had."""
    return 1 if requirements.two_ranks.unmet() else 2
