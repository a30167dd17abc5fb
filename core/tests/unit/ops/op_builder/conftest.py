"""A place to build in: sources, a cache folder, and a compiler that writes down each time it is called."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import toolchain
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.spec import BuildSpec, this_target

# What a process of its own runs: `ask()` builds the op of the workshop that the environment names. Loads no torch.
ASK = """
import os, sys
from pathlib import Path
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import jit
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.spec import BuildSpec, this_target
from deepspeed.ops.op_builder.toolchain import find_compiler

class Builder(OpBuilder):
    def absolute_name(self): return "nowhere.x_op"
    def sources(self): return []

def ask():
    builder = Builder("x")
    return jit.build(BuildSpec(
        name="x", op_namespace="x", sources=tuple(sorted(Path(os.environ["SOURCES"]).glob("*.cpp"))),
        compile_flags=("-O0",), toolchain=find_compiler(), torch="2.0", target=this_target(),
        compile_command=builder.compile_command, link_command=builder.link_command,
    ))
"""


class Builder(OpBuilder):
    """Says nothing of its own."""

    def absolute_name(self):
        return f"nowhere.{self.name}_op"

    def sources(self):
        return []


class Workshop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "csrc"
        self.cache = folder / "cache"
        self.log = folder / "compiler.log"
        self.sources.mkdir()
        (self.sources / "x.h").write_text("#define X 1\n")
        self.source = self.sources / "x.cpp"
        self.source.write_text('#include "x.h"\nextern "C" int x() { return X; }\n')

    def compiler(self, version="counting compiler 1.0", before="", name="cxx") -> Path:
        """An executable that logs, does `before` (shell), and then is c++."""
        path = self.folder / name
        path.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n'
            f'case " $* " in *" -c "*) echo compile >> "{self.log}";; *) echo link >> "{self.log}";; esac\n'
            f'{before}\nexec c++ "$@"\n'
        )
        path.chmod(0o755)
        return path

    def count(self, what="compile") -> int:
        return self.log.read_text().split().count(what) if self.log.exists() else 0

    def spec(self, **changes) -> BuildSpec:
        builder = Builder("x")
        values = {
            "name": "x",
            "op_namespace": "x",
            "sources": (self.source,),
            "compile_flags": ("-O0",),
            "toolchain": toolchain.find_compiler(),
            "torch": "2.0",
            "target": this_target(),
            "compile_command": builder.compile_command,
            "link_command": builder.link_command,
        }
        return BuildSpec(**{**values, **changes})

    def environment(self, **changes) -> dict[str, str]:
        taken = {"LOCAL_RANK", "RANK", "WORLD_SIZE"}
        kept = {name: value for name, value in os.environ.items() if name not in taken}
        return {**kept, "SOURCES": str(self.sources), "TORCH_EXTENSIONS_DIR": str(self.cache), **changes}

    def start(self, program="print(ask())", **environment) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", ASK + program],
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program="print(ask())", **environment) -> str:
        """What the program printed; it must succeed."""
        process = self.start(program, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out


@pytest.fixture
def make_workshop():
    """For a folder of the test's own."""
    return Workshop


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    found = Workshop(tmp_path)
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(found.cache))
    monkeypatch.setenv("CXX", str(found.compiler()))
    toolchain._find.cache_clear()
    toolchain.identify.cache_clear()
    yield found
    toolchain._find.cache_clear()
    toolchain.identify.cache_clear()
