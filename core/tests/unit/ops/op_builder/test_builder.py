"""OpBuilder: what a builder says, where its sources are found, and what it asks of the machine."""

import ctypes
import importlib
import subprocess
import sys
import sysconfig

import pytest
import torch
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import builder as builder_module
from deepspeed.ops.op_builder import jit
from deepspeed.ops.op_builder.builder import TORCH_MAJOR, TORCH_MINOR, OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path

# A Python module without pybind11, which takes 10 s to compile.
MODULE = """
#include <Python.h>
#include "answer.h"
#define JOIN(name) PyInit_##name
#define INIT(name) JOIN(name)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "op", "", -1, methods};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


@pytest.fixture
def vendor(tmp_path, monkeypatch, workshop):
    """Makes a package `vendor_<n>` with a builder in `op_builder/fused.py` and sources in `csrc`; returns the class."""
    made = []

    def make(answer, sources=("csrc/fused.cpp", ""), body="    pass", base="OpBuilder"):
        package = f"vendor_{len(made)}_of_test"
        folder = tmp_path / "site" / package
        (folder / "op_builder").mkdir(parents=True)
        (folder / "csrc" / "includes").mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "op_builder" / "__init__.py").touch()
        (folder / "csrc" / "fused.cpp").write_text(MODULE)
        (folder / "csrc" / "includes" / "answer.h").write_text(f"#define ANSWER {answer}\n")
        (folder / "op_builder" / "fused.py").write_text(
            "from deepspeed.ops.op_builder.builder import OpBuilder, TORCH_MAJOR, TORCH_MINOR\n"
            f"class FusedBuilder({base}):\n"
            "    BUILD_VAR = 'DS_BUILD_FUSED'\n"
            "    NAME = 'fused'\n"
            "    def __init__(self):\n        super().__init__(name=self.NAME)\n"
            f"    def absolute_name(self):\n        return '{package}.fused_op'\n"
            f"    def sources(self):\n        return {list(sources)!r}\n"
            "    def include_paths(self):\n        return ['', 'csrc/includes']\n"
            "class Other(FusedBuilder):\n" + body + "\n"
        )
        made.append(package)
        return importlib.import_module(f"{package}.op_builder.fused")

    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site").mkdir()
    yield make
    for name in [name for name in sys.modules if name.split(".")[0] in made]:
        del sys.modules[name]


def test_relative_sources_of_a_package_become_a_module(vendor):
    builder = vendor(42).FusedBuilder()
    assert builder.is_compatible(verbose=True)
    assert builder.load().answer() == 42
    assert builder.reason is None


def test_two_packages_with_one_op_name_do_not_collide(vendor):
    one, two = vendor(1).FusedBuilder(), vendor(2).FusedBuilder()
    assert (one.load().answer(), two.load().answer(), one.load().answer()) == (1, 2, 1)


def test_one_content_is_loaded_once(vendor, workshop):
    one, two = vendor(3).FusedBuilder(), vendor(3).FusedBuilder()
    assert one.load() is two.load() is one.load()
    assert workshop.count("compile") == 1


def test_a_jit_load_of_the_vendors_own(vendor):
    body = (
        "    def jit_load(self, verbose=True):\n"
        "        assert self.is_compatible(verbose), self.error_log\n"
        "        sources = [self.deepspeed_src_path(path) for path in self.sources()]\n"
        "        includes = [self.deepspeed_src_path(path) for path in self.include_paths()]\n"
        "        type(self)._loaded_ops[self.name] = 'kept'\n"
        "        return self.strip_empty_entries(sources), self.strip_empty_entries(includes), verbose\n"
    )
    module = vendor(1, body=body)
    folder = module.__file__.rpartition("/op_builder/")[0]
    sources, includes, verbose = module.Other().load(verbose=False)
    assert sources == [f"{folder}/csrc/fused.cpp"]
    assert includes == [f"{folder}/csrc/includes"]
    assert verbose is False


def test_a_load_that_asks_what_deepspeed_installed(vendor):
    """The form of DeepSpeed's own builders, which vendors copied."""
    body = (
        "    def load(self, verbose=True):\n"
        "        from deepspeed.git_version_info import installed_ops, torch_info\n"
        "        assert not installed_ops.get(self.name, False) and 'version' in torch_info\n"
        "        return self.jit_load(verbose)\n"
        "    def is_compatible(self):\n"
        "        return True\n"
    )
    assert vendor(8, body=body).Other().load().answer() == 8


def test_an_is_compatible_of_the_vendors_own(vendor):
    module = vendor(1, body="    def is_compatible(self, verbose=True):\n        return False")
    with pytest.raises(OpUnavailable, match=r"op 'fused' cannot be built here: Other\.is_compatible\(\) is False"):
        module.Other().load()


def test_a_jit_load_of_the_vendors_own_needs_no_compiler_of_ours(vendor, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    module = vendor(1, body="    def jit_load(self, verbose=True):\n        return 'own'")
    assert module.Other().load() == "own"
    assert not module.FusedBuilder().is_compatible()


def test_a_missing_source_names_all_places(vendor):
    module = vendor(1, sources=("csrc/absent.cpp",))
    folder = module.__file__.rpartition("/op_builder/")[0]
    builder = module.FusedBuilder()
    with pytest.raises(OpUnavailable) as caught:
        builder.load()
    message = str(caught.value)
    assert "source 'csrc/absent.cpp' is in none of" in message
    for place in (folder, f"{folder}/op_builder", "deepspeed/ops"):
        assert place in message
    assert builder.reason == message


def test_no_sources_at_all(vendor):
    with pytest.raises(OpUnavailable, match=r"FusedBuilder\.sources\(\) names no file"):
        vendor(1, sources=("", "")).FusedBuilder().load()


def test_an_empty_path_never_becomes_a_folder(vendor):
    builder = vendor(1).FusedBuilder()
    assert builder.deepspeed_src_path("") == ""
    assert builder.deepspeed_src_path("/absolute/x.cpp") == "/absolute/x.cpp"
    spec = builder.describe()
    assert [path.name for path in spec.sources] == ["fused.cpp"]
    assert [path.name for path in spec.include_paths] == ["includes"]
    assert builder.strip_empty_entries(["a", "", None, "b"]) == ["a", "b"]


def test_include_folders_of_an_installed_sdk_are_not_hashed(vendor):
    module = vendor(1, body="    def include_paths(self):\n        return ['csrc/includes', '/usr/include/xyz']")
    spec = module.Other().describe()
    assert [path.name for path in spec.include_paths] == ["includes"]
    assert str(spec.system_include_paths[0]) == "/usr/include/xyz"


def test_include_folders_beside_sources_are_the_projects_wherever_they_lie(vendor):
    builder = vendor(1).FusedBuilder()
    sources = [builder_module.Path("/opt/project/csrc/adam/x.cpp")]
    ours, others = builder._sort_include_paths(["/opt/project/csrc/includes", "/opt/sdk/include", "/usrlocal"], sources)
    assert [str(path) for path in ours] == ["/opt/project/csrc/includes", "/usrlocal"]
    assert [str(path) for path in others] == ["/opt/sdk/include"]


def test_flags_reach_the_compiler_and_a_default_is_portable(vendor):
    module = vendor(7, body="    def cxx_args(self):\n        return ['-O0', '', '-DANSWER=9', '-include', 'stddef.h']")
    spec = module.Other().describe()
    assert spec.compile_flags[:4] == ("-O0", "-DANSWER=9", "-include", "stddef.h")
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}" in spec.compile_flags
    default = module.FusedBuilder()
    assert "-march=native" not in default.cxx_args() + [default.cpu_arch(), default.simd_width()]
    assert default.describe().torch.startswith(str(torch.__version__))


def test_a_torch_that_is_too_old(vendor, monkeypatch, lines):
    builder = vendor(1).FusedBuilder()
    monkeypatch.setattr(type(builder), "min_torch", "99.1")
    assert not builder.is_compatible(verbose=True)
    assert builder.reason == f"it needs torch 99.1 or newer, and this is {torch.__version__.split('+')[0]}"
    assert lines == [("WARNING", f"op 'fused': {builder.reason}")]
    with pytest.raises(OpUnavailable, match=r"op 'fused' cannot be built here: it needs torch 99\.1"):
        builder.load()


def test_no_compiler_is_a_reason_and_what_was_built_still_loads(vendor, monkeypatch):
    module = vendor(5)
    prepared = module.FusedBuilder().prepare()
    assert prepared.is_file()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert module.FusedBuilder().load().answer() == 5
    (prepared.parent / "manifest.json").unlink()
    builder = module.FusedBuilder()
    assert not builder.is_compatible()
    assert "CXX is 'no-such-compiler'" in builder.reason
    with pytest.raises(OpUnavailable, match="CXX is 'no-such-compiler'"):
        builder.prepare()


def test_a_library_that_is_no_module(vendor, tmp_path):
    module = vendor(1)
    (tmp_path / "site" / "vendor_0_of_test" / "csrc" / "fused.cpp").write_text("int unrelated() { return 0; }\n")
    said = "dynamic module does not define .*; a library of torch operators says so by op_namespace"
    with pytest.raises(OpUnavailable, match=f"cannot be loaded: {said}"):
        module.FusedBuilder().load()


def test_a_symbol_that_no_source_defines_is_named(vendor, tmp_path, monkeypatch):
    module = vendor(1)
    source = tmp_path / "site" / "vendor_0_of_test" / "csrc" / "fused.cpp"
    source.write_text("extern int elsewhere; int symbol() { return elsewhere; }\n")
    monkeypatch.setattr(module.FusedBuilder, "op_namespace", "ds_of_symbols")
    with pytest.raises(OpUnavailable, match=r"cannot be loaded: .*undefined symbol: elsewhere"):
        module.FusedBuilder().load()


def test_torch_versions_as_names_of_the_module():
    assert f"{TORCH_MAJOR}.{TORCH_MINOR}." in torch.__version__
    with pytest.raises(AttributeError, match="has no attribute 'TORCH_PATCH'"):
        builder_module.TORCH_PATCH  # noqa: B018


def test_importing_loads_no_torch_and_does_nothing():
    program = (
        "import sys, os; before = set(os.environ)\n"
        "import deepspeed.ops.op_builder.builder, deepspeed.ops.op_builder.jit\n"
        "assert not {'torch', 'setuptools'} & set(sys.modules), 'loaded'\n"
        "import torch; assert 'torch.utils.cpp_extension' not in sys.modules\n"
        "from deepspeed.ops.op_builder.builder import TORCH_MAJOR\n"
        "assert 'torch.utils.cpp_extension' not in sys.modules and set(os.environ) - before <= {'x'}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_builders_ask_of_the_machine(vendor, lines):
    builder = vendor(1).FusedBuilder()
    assert builder.command_exists("sh")
    assert builder.command_exists(["no-such-command", "sh"])
    assert builder.command_exists("no-such-command|sh")  # DeepSpeed's "either"
    assert not builder.command_exists("no-such-command")
    assert builder.error_log == builder.reason == "fused needs the command no-such-command, which is not on PATH"
    assert builder.has_function("cos", ("m",))
    assert builder.has_function("cos", ("m",), library_dirs=["/usr/lib"])
    assert not builder.has_function("no_such_function", ("m",))
    assert len(lines) == 1
    assert not builder.has_function("cos", ("no_such_library",), verbose=True)
    assert "cannot find -lno_such_library" in lines[-1][1]
    assert (builder.libraries_args(), builder.extra_ldflags(), builder.python_requirements()) == ([], [], [])


def test_has_function_without_a_compiler(vendor, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not vendor(1).FusedBuilder().has_function("cos", ("m",))


def test_a_setuptools_extension(vendor):
    module = vendor(1)
    extension = module.FusedBuilder().builder()
    assert extension.name == "vendor_0_of_test.fused_op"
    assert extension.sources[0].endswith("csrc/fused.cpp")
    assert any(path.endswith("csrc/includes") for path in extension.include_dirs)
    assert "-O3" in extension.extra_compile_args["cxx"]


def test_a_compiler_of_an_extensions_own(vendor, workshop, monkeypatch):
    """As a device's base builder: its own program, its own command line."""
    own = workshop.compiler(version="device compiler 9", name="devcc")
    body = (
        "    def toolchain(self):\n"
        "        from deepspeed.ops.op_builder.toolchain import identify\n"
        f"        return identify(({str(own)!r},))\n"
        "    def compile_command(self, toolchain, source, object_path, flags):\n"
        "        return [*toolchain.command, '-fPIC', '-DDEVICE', *flags, '-c', str(source), '-o', str(object_path)]\n"
    )
    module = vendor(6, body=body)
    monkeypatch.setenv("CXX", "no-such-compiler")
    builder = module.Other()
    assert builder.describe().toolchain.identity == "device compiler 9"
    assert builder.load().answer() == 6


def test_a_module_that_a_vendors_setup_built(vendor, tmp_path, monkeypatch):
    """As with DeepSpeed: setuptools compiled `builder()` into the package."""
    module = vendor(9)
    package = tmp_path / "site" / "vendor_0_of_test"
    built = package / f"fused_op{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=fused_op", f"-I{sysconfig.get_path('include')}"]
    source = package / "csrc/fused.cpp"
    subprocess.run(["c++", *flags, f"-I{package}/csrc/includes", str(source), "-o", str(built)], check=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    builder = module.FusedBuilder()
    assert builder.is_compatible()
    assert builder.load().answer() == 9
    assert builder.load().__file__ == str(built)


def test_one_that_cannot_be_imported_is_compiled(vendor, tmp_path):
    module = vendor(4)
    (tmp_path / "site/vendor_0_of_test" / f"fused_op{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("no library")
    assert module.FusedBuilder().load().answer() == 4


def test_kernel_paths(tmp_path, vendor):
    module = vendor(1)
    package = module.__name__.split(".")[0]
    for given in (package, module.__file__.rpartition("/op_builder/")[0] + "/__init__.py"):
        path, include = make_kernel_path(given)
        assert path("csrc/fused.cpp") == path("fused.cpp") == str(tmp_path / "site" / package / "csrc/fused.cpp")
        assert include("includes") == str(tmp_path / "site" / package / "csrc/includes")
        assert include("csrc") == str(tmp_path / "site" / package / "csrc")
        assert (path(""), include(""), path("/a/b.cpp")) == ("", "", "/a/b.cpp")
    with pytest.raises(OpUnavailable, match=r"kernel source 'absent.cpp': there is no file .*csrc/absent\.cpp"):
        path("absent.cpp")
    with pytest.raises(OpUnavailable, match=r"kernel headers 'fused.cpp': there is no folder"):
        include("fused.cpp")
    path, _ = make_kernel_path("no_such_package_of_test")
    with pytest.raises(OpUnavailable, match="'no_such_package_of_test' is no package"):
        path("x.cpp")


STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
static int64_t numel(const torch::stable::Tensor& tensor) { return tensor.numel(); }
STABLE_TORCH_LIBRARY_FRAGMENT(ds_test_builder, m) { m.def("numel(Tensor tensor) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(ds_test_builder, CPU, m) { m.impl("numel", TORCH_BOX(&numel)); }
"""


class NumelBuilder(OpBuilder):
    op_namespace = "ds_test_builder"
    min_torch = "2.10"
    folder = None
    fakes = 0

    def absolute_name(self):
        return f"nowhere.{self.name}_op"

    def sources(self):
        return [str(self.folder / "numel.cpp")]

    def register_fakes(self):
        type(self).fakes += 1


@pytest.mark.skipif((TORCH_MAJOR, TORCH_MINOR) < (2, 10), reason="the operator needs torch 2.10")
def test_a_library_of_operators_is_loaded_once_for_all_ops_that_share_it(workshop):
    NumelBuilder.folder = workshop.folder
    (workshop.folder / "numel.cpp").write_text(STABLE)
    one, two = NumelBuilder("one"), NumelBuilder("two")
    spec = one.describe()
    assert spec.stable_abi
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in spec.compile_flags
    op = one.load()
    assert op.numel(torch.zeros(3, 5)) == 15
    assert two.load() is op
    assert NumelBuilder.fakes == 1
    assert workshop.count("compile") == 1


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(many CXX)
add_library(${DS_OP_NAME} SHARED first.cpp second.cpp)
target_compile_definitions(${DS_OP_NAME} PRIVATE SECOND=${SECOND})
set_target_properties(${DS_OP_NAME} PROPERTIES PREFIX "")
"""


class ManyBuilder(OpBuilder):
    cmake_dir = "many"
    op_namespace = "many"
    second = 2

    def absolute_name(self):
        return "nowhere.many_op"

    def sources(self):
        return []

    def cmake_args(self):
        return [f"-DSECOND={self.second}"]


@pytest.fixture
def many(workshop, monkeypatch):
    pytest.importorskip("shutil").which("cmake") or pytest.skip("no cmake")
    folder = workshop.folder / "many"
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(CMAKE)
    (folder / "first.cpp").write_text('extern "C" int first() { return 1; }\n')
    (folder / "second.cpp").write_text('extern "C" int second() { return SECOND; }\n')
    monkeypatch.setattr(ManyBuilder, "cmake_dir", str(folder))
    return folder


def test_a_cmake_project(many):
    spec = ManyBuilder("many").describe()
    library = ctypes.CDLL(str(jit.build(spec)))
    assert (library.first(), library.second()) == (1, 2)
    builder = ManyBuilder("many")
    builder.second = 3
    assert builder.describe().key != spec.key
    (many / "second.cpp").write_text("#error out of order\n")
    with pytest.raises(jit.BuildError, match=r"second\.cpp:1:2: error: #error out of order"):
        ManyBuilder("many").prepare()


def test_a_cmake_project_without_cmake(many, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    builder = ManyBuilder("many")
    assert not builder.is_compatible()
    assert builder.reason == "it is a CMake project, and there is no cmake on PATH"


def test_a_folder_that_is_no_cmake_project(many):
    (many / "CMakeLists.txt").unlink()
    with pytest.raises(OpUnavailable, match=r"many has no CMakeLists\.txt"):
        ManyBuilder("many").describe()
