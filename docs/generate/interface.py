"""Record what a release may not move: `python docs/generate/interface.py [--check]`.

core/tests/compat/interface.json has the keys of the configuration, the flags of the commands, both with their defaults,
the names that our packages offer, and the methods and hooks by which extensions are asked. CONTRIBUTING.md says when an
entry may change or go. DeepSpeed's own names and defaults are held by `deepspeed_names.json` and its tests.

`core/tests/house/test_interface_fresh.py` fails when the file and the code differ.
"""

import argparse
import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from completion import parsers
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import Section, default_of, section_of
from deepspeed.plugins.hookspecs import GROUPS
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[2]
FILE = ROOT / "core" / "tests" / "compat" / "interface.json"
_SOURCE = ROOT / "core" / "src"


def render() -> dict[str, dict[str, Any]]:
    """All entries, by kind and name."""
    return {
        "keys": dict(_keys(DeepSpeedConfig, "")),
        "flags": dict(entry for parser in parsers() for entry in _flags(parser)),
        "names": dict(_names()),
        "accelerator": {name: _signature(method) for name, method in _methods(DeepSpeedAccelerator)},
        "hooks": {hook.__name__: _signature(hook) for _, hooks in GROUPS.values() for hook in hooks},
    }


def text() -> str:
    """The file's."""
    return json.dumps(render(), indent=1, sort_keys=True) + "\n"


def _keys(model: type[Section], path: str) -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        where = f"{path}.{info.alias or name}".lstrip(".")
        section = section_of(info)
        default = default_of(info)
        if section is None:
            yield where, "must be given" if default is PydanticUndefined else _plain(default)
        else:
            yield where, "section" if isinstance(default, Section) else _plain(default)
            yield from _keys(section, where)
    for old, (new, _) in model.moved.items():
        yield f"{path}.{old}".lstrip("."), f"deprecated: {new}"


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _flags(each)
        elif action.help != argparse.SUPPRESS:
            yield f"{parser.prog} {' '.join(action.option_strings) or action.dest}", _plain(action.default)


def _names() -> Iterator[tuple[str, list[str]]]:
    for stub in sorted(_SOURCE.rglob("__init__.pyi")):
        package = ".".join(stub.parent.relative_to(_SOURCE).parts)
        names = {
            alias.asname or alias.name for node in ast.walk(ast.parse(stub.read_text())) for alias in _aliases(node)
        }
        module = importlib.import_module(package)
        yield package, sorted(name for name in names if not name.startswith("_") and hasattr(module, name))


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) else []


def _methods(kind: type) -> list[tuple[str, Any]]:
    return [(name, method) for name, method in inspect.getmembers(kind, callable) if not name.startswith("_")]


def _signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if FILE.exists() and FILE.read_text(encoding="utf-8") == text() else f"{FILE} is stale")
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
