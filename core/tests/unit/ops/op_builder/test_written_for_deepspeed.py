"""A builder package written by DeepSpeed's documentation and in its habits: it derives, extends, asks, and loads."""

import importlib
import subprocess
import sys

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder

SOURCE = """
#include <Python.h>
#if !defined(EXTENDED) || !defined(SHARED_HEADER) || !defined(__SCALAR__) || !defined(_OPENMP)
#error a flag of the builder did not reach the compiler
#endif
#define JOIN(name) PyInit_##name
#define INIT(name) JOIN(name)
static PyObject* standard(PyObject*, PyObject*) { return PyLong_FromLong(__cplusplus); }
static PyMethodDef methods[] = {{"standard", standard, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "op", "", -1, methods};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""

BUILDERS = """
import importlib
import os
from pathlib import Path

from deepspeed.ops.op_builder.builder import TORCH_MAJOR, TORCH_MINOR, OpBuilder, TorchCPUOpBuilder

HERE = Path(__file__).parent


class HostBuilder(TorchCPUOpBuilder):
    BUILD_VAR = "DS_BUILD_THIRD"
    NAME = "third"

    def __init__(self):
        super().__init__(name=self.NAME)

    def is_compatible(self, verbose=True):
        if not self.command_exists("no-such-compiler|c++|g++"):
            self.warning("needs a compiler")
            return False
        if not self.has_function("cos", ("m",)):
            self.warning("needs libm")
            return False
        return (TORCH_MAJOR, TORCH_MINOR) >= (2, 0) and super().is_compatible(verbose)

    def absolute_name(self):
        return f"deepspeed.ops.third.{self.NAME}_op"

    def sources(self):
        return [str(HERE / "third.cpp"), ""] if not self.is_rocm_pytorch() else []

    def include_paths(self):
        return ["", str(HERE / "includes"), *super().include_paths()]

    def cxx_args(self):
        args = super().cxx_args()
        args += ["-DEXTENDED", "-std=c++17", "", f"-include{HERE}/shared.h"]
        return args

    def libraries_args(self):
        args = super().libraries_args()
        args += ["m"]
        return args

    def extra_ldflags(self):
        return super().extra_ldflags() + ["-Wl,-O1"]

    def nvcc_args(self):
        return super().nvcc_args() + ["-O3"]

    def load(self, verbose=True):
        from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info
        from deepspeed.accelerator import get_accelerator

        if installed_ops.get(self.name, False) and accelerator_name == get_accelerator()._name:
            self.validate_torch_op_version(torch_info)
            return importlib.import_module(self.absolute_name())
        self.hipify_extension()
        return self.jit_load(verbose)
"""


class Plain(OpBuilder):
    def absolute_name(self):
        return "nowhere.plain_op"

    def sources(self):
        return []


@pytest.fixture
def third(tmp_path, monkeypatch, workshop):
    folder = tmp_path / "site" / "third_party_of_test"
    (folder / "includes").mkdir(parents=True)
    (folder / "third.cpp").write_text(SOURCE)
    (folder / "shared.h").write_text("#define SHARED_HEADER\n")
    (folder / "__init__.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield importlib.import_module(folder.name)
    del sys.modules[folder.name]


def test_it_builds_loads_and_its_flags_win(third):
    builder = third.HostBuilder()
    assert builder.is_compatible(verbose=True)
    assert builder.load().standard() == 201703
    assert builder.nvcc_args() == ["-O3"]
    assert builder.builder().name == "deepspeed.ops.third.third_op"


def test_the_plain_base_has_no_flags_of_its_own():
    plain = Plain("plain")
    answers = (
        plain.cxx_args(),
        plain.include_paths(),
        plain.extra_ldflags(),
        plain.nvcc_args(),
        plain.libraries_args(),
    )
    assert answers == ([], [], [], [], [])
    assert plain.cxx_args() is not plain.cxx_args()  # builders extend the list in place
    assert not plain.build_for_cpu
    assert not plain.enable_bf16


@pytest.mark.parametrize(
    ("flags", "added"),
    [((), ["-O3", "-std=c++20"]), (("-O0",), ["-std=c++20"]), (("-g", "--std=c++17", "-Ofast"), [])],
)
def test_a_compile_gets_a_level_and_a_standard_where_the_builder_names_none(workshop, flags, added):
    line = Plain("plain").compile_command(workshop.spec().toolchain, workshop.source, workshop.folder / "x.o", flags)
    assert [word for word in line if word in ("-O3", "-std=c++20")] == added


def test_what_the_base_answers_of_torch(monkeypatch):
    assert OpBuilder.is_rocm_pytorch() == (torch.version.hip is not None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    assert OpBuilder.is_rocm_pytorch()
    assert OpBuilder.installed_rocm_version() == (6, 4)
    monkeypatch.setattr(torch.version, "hip", None)
    assert OpBuilder.installed_rocm_version() == (0, 0)
    with pytest.raises(OpUnavailable, match=r"built with torch 1\.2, and this is torch \d+\.\d+"):
        OpBuilder.validate_torch_op_version({"version": "1.2"})


def test_the_facts_of_the_installation():
    from deepspeed import git_version_info
    from deepspeed.ops import __compatible_ops__

    assert git_version_info.version == deepspeed.__version__
    assert git_version_info.accelerator_name == get_accelerator()._name
    assert git_version_info.compatible_ops == __compatible_ops__
    assert set(git_version_info.installed_ops) >= {"fused_adam", "async_io", "cpu_adam"}
    assert set(git_version_info.installed_ops.values()) <= {True, False}
    info = git_version_info.torch_info
    assert torch.__version__.startswith(info["version"] + ".")
    assert info["cuda_version"] == (torch.version.cuda or "0.0")
    assert {"hip_version", "bf16_support"} <= set(info)
    assert deepspeed.__git_hash__ == git_version_info.git_hash
    assert deepspeed.__git_branch__ == git_version_info.git_branch
    assert isinstance(git_version_info.git_hash, (str, type(None)))
    assert isinstance(git_version_info.git_branch, (str, type(None)))
    with pytest.raises(AttributeError, match="has no attribute 'git_author'"):
        git_version_info.git_author  # noqa: B018


def test_an_op_that_was_built_beforehand_is_installed(third, monkeypatch):
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.implementations import implemented
    from deepspeed.ops.op_builder import loading

    assert not any(installed_ops.values())
    monkeypatch.setattr(loading, "is_there", lambda name: name.endswith(".cpu_adam_op"))
    if not implemented("CPUAdamBuilder"):
        pytest.skip("nobody has a builder of cpu_adam")
    found = importlib.import_module("deepspeed.git_version_info").installed_ops
    assert [op for op, there in found.items() if there] == ["cpu_adam"]


def test_importing_the_facts_loads_nothing():
    program = (
        "import sys; import deepspeed.git_version_info as facts; facts.version; facts.git_hash; facts.git_branch\n"
        "assert not {'torch', 'pluggy', 'deepspeed.ops'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
