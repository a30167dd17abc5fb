"""Examples in docstrings run, and print what they say; those of `ops`, which choose a kernel, are in `ops/`."""

import doctest
import importlib
from pathlib import Path

import deepspeed
import pytest

SOURCE = Path(deepspeed.__file__).parent


def with_examples():
    """The modules outside of `ops` whose text has an example."""
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).with_suffix("")
        if module.parts[0] not in {"ops", "_old"} and ">>> " in path.read_text(encoding="utf-8"):
            yield ".".join(("deepspeed", *module.parts))


@pytest.mark.parametrize("name", list(with_examples()))
def test_examples(single_rank, name):
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted
    assert not done.failed
