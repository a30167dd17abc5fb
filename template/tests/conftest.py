"""`--language cpp` runs the tests of one kernel language, and `none` those that are of no language; without it, all."""

import pytest

LANGUAGES = ("none", "cpp", "cuda", "sycl", "own")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--language", choices=LANGUAGES, help="the kernel language of the rendered extension")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "language" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--language")
        metafunc.parametrize("language", [chosen] if chosen else LANGUAGES, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One session per language runs what is of no language once."""
    if config.getoption("--language") not in (None, "none"):
        items[:] = [item for item in items if "language" in item.fixturenames]
