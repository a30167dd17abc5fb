"""Libraries built into a wheel through the same builders, and taken from there before anything is compiled."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.ops.op_builder import aot, loading
from deepspeed.ops.op_builder.cache import Manifest

SETUP = """
import os
from setuptools import setup

wanted = any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items())
if wanted:
    from deepspeed.ops.op_builder.aot import setup_arguments
setup(**(setup_arguments("shipped_of_test.op_builder") if wanted else {}))
"""
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "shipped-of-test"
version = "1.0"
[tool.setuptools.packages.find]
where = ["src"]
[tool.setuptools.package-data]
"*" = ["csrc/**/*"]
"""
BUILDERS = """
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path

kernel_path, kernel_include = make_kernel_path(__file__.rpartition("/op_builder/")[0])

class Base(OpBuilder):
    NAME = ""
    def __init__(self):
        super().__init__(self.NAME)
    def absolute_name(self):
        return f"shipped_of_test.ops.{self.NAME}_op"

class OperatorsBuilder(Base):
    BUILD_VAR, NAME, op_namespace = "DS_BUILD_OPERATORS", "operators", "shipped_of_test"
    def sources(self):
        return [kernel_path("operators.cpp")]

class ModuleBuilder(Base):
    BUILD_VAR, NAME = "DS_BUILD_MODULE", "module"
    def sources(self):
        return [kernel_path("module.cpp")]

class NeverBuilder(ModuleBuilder):
    BUILD_VAR, NAME, min_torch = "DS_BUILD_NEVER", "never", "99"
"""
MODULE = """
#include <Python.h>
#define JOIN(name) PyInit_##name
#define INIT(name) JOIN(name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "op", "", -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@pytest.fixture
def project(tmp_path, workshop):
    """An extension's source tree."""
    folder = tmp_path / "project"
    package = folder / "src" / "shipped_of_test"
    (package / "op_builder").mkdir(parents=True)
    (package / "csrc").mkdir()
    (folder / "setup.py").write_text(SETUP)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").touch()
    (package / "op_builder" / "__init__.py").write_text(BUILDERS)
    (package / "csrc" / "module.cpp").write_text(MODULE)
    (package / "csrc" / "operators.cpp").write_text('extern "C" int operators() { return 1; }\n')
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Those that were built: variables -> path."""
    return {}, tmp_path_factory.mktemp("wheels")


@pytest.fixture
def wheel(project, wheels):
    """Builds the wheel with these variables set, once for all tests; returns its path."""
    known, folder = wheels

    def once(blocked=(), **variables):
        key = (blocked, *sorted(variables.items()))
        if key not in known:
            built = build(blocked, variables)
            known[key] = built.rename(folder / built.name)
        return known[key]

    def build(blocked, variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
        code = f"import sys; sys.modules.update(dict.fromkeys({list(blocked)!r})); "
        code += "from setuptools.build_meta import build_wheel; build_wheel('dist')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=project,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (found,) = (project / "dist").glob("*.whl")
        return found

    return once


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Unpacks a wheel where it can be imported; returns the folder of its package."""

    def install(path):
        zipfile.ZipFile(path).extractall(tmp_path / "site")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return tmp_path / "site" / "shipped_of_test"

    yield install
    for name in [name for name in sys.modules if name.startswith("shipped_of_test")]:
        del sys.modules[name]


def names_in(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("shipped_of_test/ops/")}


def test_without_a_switch_neither_torch_nor_core_is_needed(wheel):
    built = wheel(blocked=("torch", "deepspeed"))
    assert built.name == "shipped_of_test-1.0-py3-none-any.whl"
    assert names_in(built) == set()


def test_operators_fit_every_python(wheel):
    built = wheel(DS_BUILD_OPERATORS="1")
    assert built.name.startswith("shipped_of_test-1.0-py3-none-linux_")
    assert names_in(built) == {"shipped_of_test/ops/operators_op.so", "shipped_of_test/ops/operators_op.json"}


def test_a_prebuilt_module_is_taken_without_a_compiler(wheel, installed, workshop, monkeypatch, lines):
    built = wheel(DS_BUILD_OPS="1", DS_BUILD_OPERATORS="0")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert built.name.startswith(f"shipped_of_test-1.0-{tag}-{tag}-linux_")
    assert names_in(built) == {"shipped_of_test/ops/module_op.so", "shipped_of_test/ops/module_op.json"}
    package = installed(built)
    monkeypatch.setenv("CXX", "no-such-compiler")
    builder = importlib.import_module("shipped_of_test.op_builder").ModuleBuilder()
    assert builder.is_compatible()
    assert builder.prepare() == package / "ops" / "module_op.so"
    loaded = builder.load()
    assert sys.modules["shipped_of_test.ops.module_op"] is loaded
    assert builder.load() is loaded
    assert not workshop.cache.exists() or list(workshop.cache.iterdir()) == []


def test_a_prebuilt_library_of_other_sources_is_not_taken(wheel, installed, workshop, lines):
    from deepspeed.log import logger

    package = installed(wheel(DS_BUILD_OPS="1", DS_BUILD_OPERATORS="0"))
    with (package / "csrc" / "module.cpp").open("a") as source:
        source.write("// edited\n")
    level = logger.level
    logger.setLevel("INFO")
    before = workshop.count("compile")
    loaded = importlib.import_module("shipped_of_test.op_builder").ModuleBuilder().load()
    logger.setLevel(level)
    assert loaded.__file__.startswith(str(workshop.cache))
    assert workshop.count("compile") == before + 1
    assert any("was built from other sources or with other flags; it is compiled instead" in text for _, text in lines)


def test_a_cut_prebuilt_library_is_not_taken(wheel, installed):
    package = installed(wheel(DS_BUILD_OPS="1", DS_BUILD_OPERATORS="0"))
    builder = importlib.import_module("shipped_of_test.op_builder").ModuleBuilder()
    library = package / "ops" / "module_op.so"
    library.write_bytes(library.read_bytes()[:1000])
    found, reason = loading.find(builder.absolute_name(), builder.describe())
    assert found is None
    assert "has 1000 bytes, but" in reason
    library.with_suffix(".json").unlink()
    assert loading.find(builder.absolute_name(), builder.describe()) == (None, f"{library} has no manifest beside it")


def test_an_editable_install_has_them_in_the_source_tree(project):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=project,
        env={**kept, "DS_BUILD_OPERATORS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = project / "src" / "shipped_of_test" / "ops"
    assert sorted(path.name for path in folder.iterdir()) == ["operators_op.json", "operators_op.so"]


@pytest.fixture
def in_project(project, monkeypatch):
    monkeypatch.chdir(project)
    yield
    for name in [name for name in sys.modules if name.startswith("shipped_of_test")]:
        del sys.modules[name]


def ask(**environment):
    arguments = aot.setup_arguments("shipped_of_test.op_builder", "src", environment)
    return [extension.name for extension in arguments.get("ext_modules", [])]


def test_the_switches(in_project, lines):
    version = torch.__version__.split("+")[0]
    assert ask() == ask(DS_BUILD_OPS="0") == []
    assert ask(DS_BUILD_OPS="1") == ["shipped_of_test.ops.module_op", "shipped_of_test.ops.operators_op"]
    assert [text for _, text in lines] == [
        f"DS_BUILD_OPS=1: op 'never' is left out: it needs torch 99 or newer, and this is {version}"
    ]
    assert ask(DS_BUILD_OPS="1", DS_BUILD_MODULE="0", DS_BUILD_NEVER="0") == ["shipped_of_test.ops.operators_op"]
    with pytest.raises(OpUnavailable, match="DS_BUILD_NEVER=1: op 'never' cannot be built here: it needs torch 99"):
        ask(DS_BUILD_NEVER="1")
    with pytest.raises(ConfigError, match="DS_BUILD_OPS: found 'yes', but it must be 0 or 1"):
        ask(DS_BUILD_OPS="yes")
    assert "src" not in [os.path.basename(path) for path in sys.path[:1]]


def test_a_failed_build_names_the_error_and_the_command(in_project, tmp_path):
    source = tmp_path / "project/src/shipped_of_test/csrc/operators.cpp"
    source.write_text("#error not today\n")
    (extension,) = aot.setup_arguments("shipped_of_test.op_builder", "src", {"DS_BUILD_OPERATORS": "1"})["ext_modules"]
    with pytest.raises(OpUnavailable, match=r"#error not today; command: \S+cxx -fPIC"):
        aot.build_ahead(extension.builder, tmp_path / "out" / "operators_op.so")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"torch": "2.99 abi1"}, "is for torch 2.99 abi1, and this is 2.0"),
        ({"torch": "2.99 abi1", "stable_abi": True, "min_torch": "2.10"}, None),
        ({"target": "riscv64-linux-glibc 2.36"}, "is for riscv64-linux-glibc 2.36, and this is"),
        ({"python": "cpython-312"}, "is for cpython-312, and this is"),
        ({"cpu": "1234"}, "is for the CPU of the machine that built it"),
        ({"source_digest": "1234"}, "was built from other sources or with other flags"),
    ],
    ids=str,
)
def test_which_prebuilt_library_fits(workshop, change, reason):
    spec = workshop.spec()
    library = workshop.folder / "x.so"
    library.write_bytes(b"library")
    manifest = dataclasses.replace(Manifest.of(spec, library, []), **change)
    found = loading.misfit(manifest, spec)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_another_c_library_is_left_to_the_loader(workshop):
    spec = workshop.spec()
    library = workshop.folder / "x.so"
    library.write_bytes(b"library")
    manifest = dataclasses.replace(
        Manifest.of(spec, library, []), target="-".join([*spec.target.split("-")[:2], "glibc 2.1"])
    )
    assert loading.misfit(manifest, spec) is None
    manifest.write(workshop.folder / "x.json")
    assert json.loads((workshop.folder / "x.json").read_text())["target"].endswith("glibc 2.1")
    assert Manifest.read(workshop.folder / "x.json") == manifest


def test_no_package_no_prebuilt_library():
    assert loading.library_beside_package("x_op") is None
    assert loading.library_beside_package("no_such_package.ops.x_op") is None
