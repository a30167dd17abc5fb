"""Docstrings are sentences: none begins with a word that fragments begin with. Strings below attributes count too."""

import ast
from pathlib import Path

import deepspeed
import pytest

SOURCE = Path(deepspeed.__file__).parent
#: "What it holds.", "Of the whole model.", "As torch's.", "By rank, the shapes.": the reader has to guess the rest
OF_FRAGMENTS = {
    *("What", "Which", "Why", "How", "Where", "Those", "Such", "Or", "Nor"),
    *("Of", "As", "By", "In", "For", "With", "To", "On", "At", "Around", "Args:"),
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def text_of(node):
    """The text of a statement that is nothing but a string; "" of any other."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return node.value.value if is_text else ""


def docstrings(tree):
    """The statements that are docstrings, of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        if isinstance(node, DOCUMENTED):
            yield from body[:1]
        for before, statement in zip(body, body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign):
                yield statement


def fragments(source):
    """Line and first line of each docstring that is no sentence."""
    for statement in docstrings(ast.parse(source)):
        if (text := text_of(statement)).split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in OF_FRAGMENTS:
            yield statement.lineno, text.splitlines()[0]


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
    assert [line for line, _ in fragments(f'class A:\n    x: int = 0\n    """{first}"""\n')] == [3]
    assert list(fragments(f'class A:\n    """A class."""\n\n    x = "{first}"\n')) == []
