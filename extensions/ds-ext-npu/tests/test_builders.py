"""Builders: over what the vendor brings, and the base that compiles C++ against CANN (one of stubs, made here)."""

import ctypes
import shutil
import subprocess
import sys
import types

import pytest
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path
from deepspeed.testing.answers import check_arguments
from ds_ext_npu.op_builder import NPUOpBuilder, ascend_kernel_include, ascend_kernel_path, builders
from ds_ext_npu.op_builder.npu_op_builder import cann_home, torch_npu_folder
from ds_ext_npu.op_builder.vendor_op_builder import VendorOpBuilder

# ----- over the vendor's operators -----------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """A torch_npu with the names of every operator that is called."""
    package = types.ModuleType("torch_npu")
    package.__version__ = "2.1.0"
    for kind in builders().values():
        for name in kind.calls:
            setattr(package, name, None)
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    return package


@pytest.mark.parametrize("name", builders())
def test_a_builder_wants_the_operators_that_it_calls(package, name):
    builder = builders()[name]()
    assert builder.is_compatible()
    assert builder.reason is None
    assert builder.sources() == []
    delattr(package, builder.calls[-1])
    assert not builder.is_compatible()
    assert builder.reason == f"torch_npu 2.1.0 has no {builder.calls[-1]}; install a newer one"
    with pytest.raises(OpUnavailable, match=f"has no {builder.calls[-1]}"):
        builder.load()


@pytest.mark.parametrize("name", builders())
def test_without_the_vendors_package_the_reason_is_told(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # what Python raises ImportError for
    builder = builders()[name]()
    assert not builder.is_compatible()
    assert builder.reason.startswith("torch_npu cannot be imported: ModuleNotFoundError: ")


def test_a_builder_is_called_as_others_are():
    for name in ("is_compatible", "load", "sources"):
        check_arguments(getattr(VendorOpBuilder, name), getattr(OpBuilder, name))


def test_adam_loads_as_a_module_with_the_operator_of_the_front(package):
    assert callable(builders()["FusedAdamBuilder"]().load().adam_step_)


# ----- C++ against CANN ----------------------------------------------------------------------------------------------

HEADER = """
#pragma once
extern "C" int aclrtGetDeviceCount(unsigned int* count);
"""
SOURCE = """
#include <acl/acl.h>
#include <torch_npu/csrc/version.h>
#include "answer.h"
extern "C" int opapi_version();
extern "C" int answer() {
    unsigned int count = 0;
    aclrtGetDeviceCount(&count);
    return opapi_version() + static_cast<int>(count) + npu_version() + ANSWER;
}
"""
STUBS = {
    "cann/lib64/libascendcl.so": 'extern "C" int aclrtGetDeviceCount(unsigned int* count) { *count = 8; return 0; }',
    "cann/lib64/libopapi.so": 'extern "C" int opapi_version() { return 100; }',
    "site/torch_npu/lib/libtorch_npu.so": 'extern "C" int npu_version() { return 1000; }',
}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """A folder of CANN and an installed torch_npu, both of stubs, and an empty cache of built ops."""
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    write(tmp_path / "cann/include/acl/acl.h", HEADER)
    write(tmp_path / "site/torch_npu/__init__.py", "raise AssertionError('was imported')")
    write(tmp_path / "site/torch_npu/include/torch_npu/csrc/version.h", 'extern "C" int npu_version();\n')
    for name, code in STUBS.items():
        source = write(tmp_path / "stubs" / f"{(tmp_path / name).stem}.cpp", code)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / name)], check=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    return tmp_path


def make_builder(folder):
    """A vendor's builder whose sources lie in a package of its own."""
    write(folder / "csrc/answer/answer.cpp", SOURCE)
    write(folder / "csrc/common/answer.h", "#define ANSWER 10000\n")
    own_path, own_include = make_kernel_path(folder)

    class AnswerBuilder(NPUOpBuilder):
        BUILD_VAR, NAME = "DS_BUILD_ANSWER", "answer"
        op_namespace = "ds_answer"

        def absolute_name(self):
            return "ds_ext_npu.op_builder.answer_op"

        def sources(self):
            return [own_path("answer/answer.cpp")]

        def include_paths(self):
            return [own_include("common"), *super().include_paths()]

    return AnswerBuilder()


def test_a_source_finds_the_headers_and_libraries_of_cann_and_torch_npu(cann):
    builder = make_builder(cann / "own")
    assert builder.is_compatible(), builder.reason
    assert ctypes.CDLL(str(builder.prepare())).answer() == 11108
    assert builder.describe().link_flags[-7:-4] == ("-lopapi", "-lascendcl", "-ltorch_npu")


def test_the_older_variable_names_cann_too(cann):
    environment = {"ASCEND_TOOLKIT_HOME": str(cann / "cann")}
    assert cann_home(environment) == cann / "cann"


def test_without_cann_a_builder_says_what_to_do(cann, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH")
    builder = make_builder(cann / "own")
    assert not builder.is_compatible()
    assert builder.reason == (
        "CANN is not known here: neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set; source CANN's set_env.sh"
    )


def test_a_folder_without_headers_is_no_cann(cann):
    with pytest.raises(OpUnavailable, match=r"ASCEND_HOME_PATH=.*stubs has no folder include"):
        cann_home({"ASCEND_HOME_PATH": str(cann / "stubs")})


def test_without_torch_npu_a_builder_says_what_to_do(cann):
    shutil.rmtree(cann / "site/torch_npu")
    with pytest.raises(OpUnavailable, match="torch_npu is not installed"):
        torch_npu_folder()
    builder = make_builder(cann / "own")
    assert not builder.is_compatible()
    assert builder.reason.startswith("torch_npu is not installed")


def test_paths_of_this_package(tmp_path):
    assert ascend_kernel_path(str(tmp_path / "x.cpp")) == str(tmp_path / "x.cpp")
    with pytest.raises(OpUnavailable, match=r"there is no file .*ds_ext_npu/csrc/x\.cpp"):
        ascend_kernel_path("csrc/x.cpp")
    with pytest.raises(OpUnavailable, match=r"there is no folder .*ds_ext_npu/csrc/common"):
        ascend_kernel_include("common")
