"""`--language cpp` runs the tests of one kernel language; without it, of all."""

import pytest

LANGUAGES = ("none", "cpp", "cuda", "sycl", "own")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--language", choices=LANGUAGES, help="the kernel language of the rendered extension")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "language" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--language")
        metafunc.parametrize("language", [chosen] if chosen else LANGUAGES, scope="module")
