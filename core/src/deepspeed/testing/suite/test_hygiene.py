"""Hygiene of the plugin: it declares its API version, its probe is cheap, and it has no side effects on other code.

Effects of an import are visible only in a fresh process, so these tests start one and inspect it. The suite also checks
itself: tests call every documented method, and the list of expected failures names only existing tests.
"""

import ast
import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
import torch
from packaging.specifiers import SpecifierSet

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.accelerator.current import explain
from deepspeed.ops.implementations import builder_names, call_quietly, construct, implemented, incompatible
from deepspeed.plugins import plugin_manager
from deepspeed.plugins.admission import ACCELERATORS
from deepspeed.testing import requirements, suite
from deepspeed.testing.suite.fixtures import path_of_list, read_expected_failures, unknown_names

# Each process without DS_ACCELERATOR calls the probe. The limit leaves room for a busy machine.
_PROBE_LIMIT_S = 1.0

_LOOK = """
import json, os, random, sys, threading, time, warnings
import deepspeed.plugins
import importlib_metadata
import numpy

def state():
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "filters": len(warnings.filters),
        "random": hash(random.getstate()),
        "numpy": hash(numpy.random.get_state()[1].tobytes()),
        "recursion": sys.getrecursionlimit(),
        "hook": sys.excepthook is sys.__excepthook__,
    }

group, name = sys.argv[1:]
(entry,) = importlib_metadata.entry_points(group=group, name=name)
before = state()
plugin = entry.load()
after = state()
begin = time.perf_counter()
offer = plugin.ds_probe()
seconds = time.perf_counter() - begin
again = plugin.ds_probe()
torch = sys.modules.get("torch")
used = []
if torch is not None:
    for kind in ("accelerator", name):
        module = getattr(torch, kind, None)
        asked = getattr(module, "is_initialized", None)
        if asked is not None and asked():
            used.append(kind)
print(json.dumps({
    "changed": [key for key in before if before[key] != after[key]],
    "changed by probe": [key for key in after if key != "threads" and after[key] != state()[key]],
    "torch": torch is not None,
    "seconds": seconds,
    "offers": [[each.name, each.priority, each.available] for each in (offer, again)],
    "initialized": used,
    "api": getattr(plugin, "DS_PLUGIN_API", None),
}))
"""


def _fresh_plugin() -> dict[str, Any]:
    """Import and probe the current plugin in a fresh process, and return what that process observed."""
    requirements.plugin.check()
    name = str(explain().plugin)
    if not importlib_metadata.entry_points(group=ACCELERATORS, name=name):
        pytest.skip(f"plugin {name!r} was registered by the program, no package announces it")
    return _look(name)


@functools.cache
def _look(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, ACCELERATORS, name], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_the_plugin_states_its_api() -> None:
    seen = _fresh_plugin()
    assert seen["api"], "the plugin module has no DS_PLUGIN_API, such as '>=1,<2'"
    SpecifierSet(seen["api"])


def test_importing_the_plugin_changes_nothing() -> None:
    seen = _fresh_plugin()
    assert seen["changed"] == []


def test_probing_is_cheap() -> None:
    seen = _fresh_plugin()
    assert not seen["torch"], "the plugin module or its probe imports torch"
    assert seen["seconds"] < _PROBE_LIMIT_S
    assert seen["changed by probe"] == []


def test_probing_creates_no_context() -> None:
    seen = _fresh_plugin()
    assert seen["initialized"] == []


def test_the_offer_is_steady_and_under_its_own_name() -> None:
    seen = _fresh_plugin()
    first, second = seen["offers"]
    assert first == second
    assert first[0] == explain().plugin
    assert first[2] is True


def test_the_offer_claims_the_device_of_torch(accelerator: DeepSpeedAccelerator) -> None:
    requirements.plugin.check()
    offer = plugin_manager().probe(str(explain().plugin))
    assert offer.device == accelerator.device_name(), (
        f"Offer({offer.name!r}) claims torch's device {offer.device!r}, and the accelerator's is "
        f"{accelerator.device_name()!r}: give the offer impersonates={accelerator.device_name()!r}"
    )


def test_the_plugin_is_what_made_the_accelerator(accelerator: DeepSpeedAccelerator) -> None:
    requirements.plugin.check()
    name = str(explain().plugin)
    assert {"ds_probe", "ds_accelerator"} <= set(plugin_manager().hooks_of(name))
    assert plugin_manager().failure(name) is None
    assert torch.device(accelerator.device_name()).type == accelerator.device_name()


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return path -> (size, modification time) of the installed files, without Python's caches."""
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_nothing_is_written_where_it_is_installed(accelerator: DeepSpeedAccelerator) -> None:
    kind = type(get_accelerator())
    package = sys.modules[kind.__module__.partition(".")[0]]
    if package.__name__ == "deepspeed" or not getattr(package, "__file__", None):
        pytest.skip(f"{kind.__name__} is in no package of its own")
    folder = Path(str(package.__file__)).parent
    before = _files(folder)
    for name in builder_names():
        for found in implemented(name):
            builder, _ = construct(found.builder_class) if found.source == "device" else (None, None)
            if builder is not None and incompatible(builder) is None:
                call_quietly(builder.load)
    torch.ones(2, device=accelerator.device_name()).sum().item()
    assert _files(folder) == before


# ----- the suite itself ----------------------------------------------------------------------------------------------


def _names_asked(source: str) -> set[str]:
    """Return the attributes of the argument `accelerator` that a file's test functions use."""
    names: set[str] = set()
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    names.update([node.attr] if node.value.id == "accelerator" else [])
    return names


def test_every_documented_method_is_asked_by_a_test() -> None:
    themes = [theme for theme, level in suite.THEMES.items() if level <= suite.DEFAULT_LEVEL]
    sources = [Path(suite.__file__).with_name(f"test_{theme}.py").read_text(encoding="utf-8") for theme in themes]
    asked = set().union(*map(_names_asked, sources))
    asked |= _parametrized_names()
    assert sorted(set(documented_names()) - asked) == []


def _parametrized_names() -> set[str]:
    """Return the strings in the parameters of tests; some are names of methods."""
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
    unknown = unknown_names(read_expected_failures(path), suite.all_tests())
    assert not unknown, f"{path} names no tests of the suite: {', '.join(unknown)}"
