"""`deepspeed_names.py` records what packages have from other modules of DeepSpeed, and nothing of other libraries."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

GENERATE = Path(__file__).parents[1] / "generate"
TEXTS = {
    "deepspeed": "from . import comm\nfrom .utils import logger as log, _hidden\nimport os\nversion = '1'",
    "deepspeed.comm": "from .comm import *\nimport deepspeed.utils as tools\nif TYPE_CHECKING:\n    from . import late",
    "deepspeed.comm.comm": "import torch\nimport deepspeed.comm.torch\nfrom ..utils import logger\ndef send(): ...",
    "deepspeed.comm.late": "late = 1",
    "deepspeed.comm.torch": "class TorchBackend: ...",
    "deepspeed.listed": "from .all import *",
    "deepspeed.listed.all": "__all__ = ['_one']\n_one = 1\ntwo = 2",
    "deepspeed.ops": "try:\n    from op_builder import AdamBuilder\nexcept ImportError:\n    pass",
    "deepspeed.ops.op_builder": "for name in ():\n    pass",
    "deepspeed.utils": "from .logging import logger, os\nfrom .logging import nothing as _hidden",
    "deepspeed.utils.logging": "import os\nlogger = 1",
}
PACKAGES = {
    "deepspeed",
    "deepspeed.comm",
    "deepspeed.listed",
    "deepspeed.ops",
    "deepspeed.ops.op_builder",
    "deepspeed.utils",
}


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.syspath_prepend(str(GENERATE))
    import deepspeed_names

    return deepspeed_names.Imports({name: ast.parse(text) for name, text in TEXTS.items()}, PACKAGES)


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("deepspeed", {"comm": "deepspeed.comm", "log": "deepspeed.utils.logging:logger", "utils": "deepspeed.utils"}),
        (
            "deepspeed.comm",  # neither torch's names, nor the submodule that they hide, nor what is for type checkers
            {
                "comm": "deepspeed.comm.comm",
                "deepspeed": "deepspeed",
                "tools": "deepspeed.utils",
                "logger": "deepspeed.utils.logging:logger",
                "send": "deepspeed.comm.comm:send",
            },
        ),
        ("deepspeed.listed", {"all": "deepspeed.listed.all"}),
        (
            "deepspeed.ops",
            {"AdamBuilder": "deepspeed.ops.op_builder:AdamBuilder", "op_builder": "deepspeed.ops.op_builder"},
        ),
        ("deepspeed.utils", {"logger": "deepspeed.utils.logging:logger", "logging": "deepspeed.utils.logging"}),
    ],
)
def test_reexports_of_a_package(imports, package: str, expected: dict[str, str]) -> None:
    assert imports.reexports(package) == expected


def test_a_name_that_no_statement_binds_is_one_of_its_module(imports) -> None:
    assert set(imports.unbound()) == {
        ("deepspeed.ops.op_builder", "AdamBuilder"),
        ("deepspeed.utils.logging", "nothing"),
    }


@pytest.mark.parametrize("words", [[], ["--check"]])
def test_without_a_folder_it_says_how_it_is_called(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, GENERATE / "deepspeed_names.py", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python docs/generate/deepspeed_names.py FOLDER")
