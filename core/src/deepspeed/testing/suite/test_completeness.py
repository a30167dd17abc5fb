"""The suite looks at itself: every documented method is asked somewhere, and the list of expected failures is real."""

import ast
import importlib
from pathlib import Path

import pytest

from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.testing import suite
from deepspeed.testing.suite.expected_failures import path_of_list, read_expected_failures, unknown_names


def _names_asked(source: str) -> set[str]:
    """Attributes that test functions of a file take from their argument `accelerator`."""
    names: set[str] = set()
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    names.update([node.attr] if node.value.id == "accelerator" else [])
    return names


def test_every_documented_method_is_asked_by_a_test() -> None:
    themes = [Path(suite.__file__).with_name(f"test_{theme}.py") for theme in suite.THEMES]
    sources = [path.read_text(encoding="utf-8") for path in themes if path != Path(__file__)]
    asked = set().union(*map(_names_asked, sources))
    asked |= _parametrized_names()
    assert sorted(set(documented_names()) - asked) == []


def _parametrized_names() -> set[str]:
    """Words that tests get as parameters: names of methods among them."""
    names: set[str] = set()
    for name in suite.__all__:
        for mark in getattr(getattr(suite, name), "pytestmark", []):
            if mark.name == "parametrize":
                names.update(value for value in mark.args[1] if isinstance(value, str))
    return names


def test_every_theme_has_tests() -> None:
    for theme in suite.THEMES:
        module = importlib.import_module(f"{suite.__name__}.test_{theme}")
        assert [name for name in vars(module) if name.startswith("test_")], theme


def test_expected_failures_are_tests_of_the_suite(request: pytest.FixtureRequest) -> None:
    path = path_of_list(request.config, Path(request.path))
    unknown = unknown_names(read_expected_failures(path), suite.__all__)
    assert not unknown, f"{path} names no tests of the suite: {', '.join(unknown)}"
