"""`--language cpp` runs the tests of one kernel language, and `none` those that are of no language; without it, all."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LANGUAGES = ("none", "cpp", "cuda", "sycl", "own")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--language", choices=LANGUAGES, help="the kernel language of the rendered extension")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "language" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--language")
        metafunc.parametrize("language", [chosen] if chosen else LANGUAGES, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One session per language runs what is of no language once. Tests of other folders stay as they are."""
    if config.getoption("--language") not in (None, "none"):
        items[:] = [item for item in items if HERE not in item.path.parents or "language" in item.fixturenames]
