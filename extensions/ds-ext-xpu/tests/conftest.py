"""A stand-in for Intel's compiler: notes its arguments, takes out what is SYCL's, and calls the C++ compiler."""

import json
import os
import shlex
import stat
import sys

import pytest
import torch

VERSION = "Intel(R) oneAPI DPC++/C++ Compiler {year}.3.2 ({year}.3.2.20251117)"
SCRIPT = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print({version!r})
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
ours = ("-fsycl", "-fno-sycl", "-fp-model", "-foffload", "-Xsycl", "-device", "-ltorch_xpu")
compiler = {compiler!r}
os.execvp(compiler[0], [*compiler, *(one for one in arguments if not one.startswith(ours))])
"""


class FakeIcpx:
    """A folder with an `icpx` in it."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "calls.jsonl"

    def install(self, year=2025):
        path = self.folder / "icpx"
        path.write_text(
            SCRIPT.format(
                python=sys.executable,
                version=VERSION.format(year=year),
                log=str(self.log),
                compiler=shlex.split(os.environ.get("CXX", "")) or ["c++"],
            )
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def calls(self):
        """The argument lists, oldest first."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def icpx(tmp_path, monkeypatch):
    """Not installed yet; first on PATH when it is, with a cache of built ops of the test's own."""
    folder = tmp_path / "oneapi"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CMPLR_ROOT", raising=False)
    monkeypatch.delenv("TORCH_XPU_ARCH_LIST", raising=False)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
    return FakeIcpx(folder)


@pytest.fixture
def needs_stable_abi():
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        pytest.skip("operators through the stable ABI need torch 2.10")
