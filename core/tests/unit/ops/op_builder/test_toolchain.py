"""Which compiler is taken, and what is said when there is none."""

import shutil

import pytest
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.toolchain import find_compiler, identify


def test_cxx_is_taken_with_its_arguments(workshop, monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('env')} {workshop.compiler()}")
    assert find_compiler().command == (shutil.which("env"), str(workshop.compiler()))
    assert find_compiler().identity == "counting compiler 1.0"


def test_a_wrong_cxx_is_not_replaced(workshop, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(OpUnavailable, match="CXX is 'no-such-compiler -O2', which is not on PATH"):
        find_compiler()


def test_the_first_on_path(workshop, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(workshop.folder))
    with pytest.raises(OpUnavailable, match=r"none of c\+\+, g\+\+, clang\+\+ is on PATH and CXX is not set"):
        find_compiler()
    workshop.compiler(version="clang version 3", name="clang++")
    assert find_compiler().command == ("clang++",)


def test_one_that_does_not_run(workshop):
    broken = workshop.folder / "broken"
    broken.write_text("#!/bin/sh\necho 'licence expired' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(OpUnavailable, match="does not run: licence expired"):
        identify((str(broken),))
    broken.write_text("no script and no program")
    with pytest.raises(OpUnavailable, match="does not run"):
        identify((str(broken), ""))
