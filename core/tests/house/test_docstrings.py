"""Docstrings are sentences: none begins with a word that only a fragment begins with."""

import ast
from pathlib import Path

import deepspeed
import pytest

SOURCE = Path(deepspeed.__file__).parent
#: "What it holds.", "Of the whole model.", "As torch's.", "How many there are.": the reader has to guess the rest
OF_FRAGMENTS = {"What", "Of", "As", "How", "Args:"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(text):
    """Line and first words of each docstring in this source that is no sentence."""
    for node in ast.walk(ast.parse(text)):
        docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if docstring and docstring.split(maxsplit=1)[0] in OF_FRAGMENTS:
            yield node.body[0].lineno, docstring.splitlines()[0]


def test_docstrings_are_sentences():
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {words}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, words in fragments(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("first", ["What is held.", "Of all layers.", "As torch's.", "How many.", "Args:\\n    x: y"])
def test_a_fragment_is_found(first):
    assert [line for line, _ in fragments(f'"""A module."""\n\n\ndef f():\n    """{first}"""\n')] == [5]
