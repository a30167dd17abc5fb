"""What makes a build another one, and what does not."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import jit, toolchain
from deepspeed.ops.op_builder import spec as spec_module
from deepspeed.ops.op_builder.spec import scan


def test_the_same_content_elsewhere_has_the_same_key(workshop):
    elsewhere = workshop.folder / "another environment" / "site-packages"
    shutil.copytree(workshop.sources, elsewhere)
    one = workshop.spec(include_paths=(workshop.sources,), system_include_paths=(Path("/a/torch/include"),))
    two = workshop.spec(
        sources=(elsewhere / "x.cpp",),
        include_paths=(elsewhere,),
        system_include_paths=(Path("/b/torch/include"),),
        library_paths=(Path("/b/torch/lib"),),
    )
    assert one.key == two.key
    assert one.entry == two.entry


def test_the_same_compiler_elsewhere_has_the_same_key(workshop, monkeypatch):
    one = workshop.spec().key
    monkeypatch.setenv("CXX", str(workshop.compiler(name="copy")))
    assert workshop.spec().key == one


@pytest.mark.parametrize(
    "change",
    [
        {"compile_flags": ("-O0", "-DY")},
        {"link_flags": ("-lm",)},
        {"torch": "2.1"},
        {"target": "another machine"},
        {"python": "cpython-312"},
        {"op_namespace": "y"},
        {"op_namespace": None},
    ],
    ids=str,
)
def test_a_change_of_the_build_changes_the_key(workshop, change):
    assert workshop.spec(**change).key != workshop.spec().key


def test_another_compiler_changes_the_key_and_not_the_content(workshop, monkeypatch):
    one = workshop.spec()
    monkeypatch.setenv("CXX", str(workshop.compiler(version="counting compiler 1.1", name="newer")))
    two = workshop.spec()
    assert one.key != two.key
    assert one.content == two.content


@pytest.mark.parametrize("words", ["{} -march=native", "{} -DX=2", "env X=2 {}", "{} @flags"])
def test_flags_in_cxx_change_the_key(workshop, monkeypatch, words):
    """`g++` and `g++ -march=native` on one shared home: the second's library is no good for the first's machines."""
    one = workshop.spec().key
    monkeypatch.setenv("CXX", words.format(workshop.compiler()))
    flags = workshop.spec().toolchain.flags
    assert flags
    assert workshop.spec().key != one


def test_a_program_before_the_compiler_does_not_change_the_key(workshop, monkeypatch):
    one = workshop.spec().key
    monkeypatch.setenv("CXX", f"{shutil.which('env')} {workshop.compiler()}")
    assert workshop.spec().key == one


def test_a_library_for_this_cpu_is_for_no_other_however_the_flag_came(workshop, monkeypatch):
    """By `$CXX`, or by a builder's own command line; also where there is no compiler, so that the key is not known."""

    def commands(toolchain, source, object_path, flags):
        return [*toolchain.command, "-mtune=native", *flags, "-fPIC", "-c", str(source), "-o", str(object_path)]

    own_line = workshop.spec(compile_command=commands)
    monkeypatch.setenv("CXX", f"{workshop.compiler()} -march=native")
    by_variable = workshop.spec()
    assert own_line.cpu == by_variable.cpu == spec_module.this_cpu_digest()
    library = jit.build(by_variable)
    assert jit.find(workshop.spec(toolchain=None)) == library
    monkeypatch.setattr(spec_module, "this_cpu", lambda: "another CPU")
    assert jit.find(workshop.spec(toolchain=None)) is None
    assert jit.find(workshop.spec()) is None


@pytest.mark.parametrize(
    ("variable", "for_cmake"),
    [("CPLUS_INCLUDE_PATH", False), ("LIBRARY_PATH", False), ("DEVICE_FLAGS", False), ("CXXFLAGS", True)],
)
def test_what_a_compiler_reads_from_the_environment_changes_the_key(workshop, monkeypatch, variable, for_cmake):
    def key():
        compiler = dataclasses.replace(toolchain.find_compiler(), variables=("DEVICE_FLAGS",))
        return workshop.spec(toolchain=compiler, environment=compiler.environment(for_cmake)).key

    one = key()
    monkeypatch.setenv(variable, "/somewhere")
    assert key() != one


def test_another_command_line_changes_the_key(workshop):
    def commands(toolchain, source, object_path, flags):
        return [*toolchain.command, "-g", *flags, "-c", str(source), "-o", str(object_path)]

    assert workshop.spec(compile_command=commands).key != workshop.spec().key


@pytest.mark.parametrize("file", ["x.cpp", "x.h", "deep/inner.h"])
def test_a_change_in_any_file_changes_the_key(workshop, file):
    (workshop.sources / "deep").mkdir()
    (workshop.sources / "deep" / "inner.h").write_text("int inner;\n")
    (workshop.sources / "x.h").write_text('#pragma once\n  #  include "deep/inner.h"\n')
    one = workshop.spec().key
    assert workshop.spec().key == one
    with (workshop.sources / file).open("a") as added:
        added.write("// more\n")
    assert workshop.spec().key != one


def test_a_file_that_is_not_included_does_not_matter(workshop):
    one = workshop.spec(include_paths=(workshop.sources,)).key
    (workshop.sources / "unused.h").write_text("int unused;\n")
    assert workshop.spec(include_paths=(workshop.sources,)).key == one


def test_flags_for_this_cpu_are_kept_apart_by_cpu(workshop, monkeypatch):
    spec = workshop.spec(compile_flags=("-march=native",))
    monkeypatch.setattr(spec_module, "this_cpu", lambda: "another CPU")
    assert dataclasses.replace(spec).cpu == dataclasses.replace(spec).cpu != ""
    other = dataclasses.replace(spec).key
    monkeypatch.undo()
    assert spec.key != other
    assert workshop.spec().cpu == ""


def test_modules_are_told_apart_by_name_and_operators_are_not(workshop):
    assert workshop.spec(name="y").entry == workshop.spec().entry
    assert workshop.spec(name="y", op_namespace=None).entry.startswith("y_")
    assert workshop.spec(name="y", op_namespace=None).key != workshop.spec(name="x", op_namespace=None).key


def test_operators_are_named_after_their_source(workshop):
    source = workshop.sources / "my-op.v2.cpp"
    source.touch()
    assert workshop.spec(sources=(source,)).entry.startswith("my_op_v2_")


@pytest.mark.parametrize("text", ["#define JOIN(a, b) <a/b>\n#include JOIN(deep, inner.h)\n", "#include FROM_A_FLAG\n"])
def test_every_header_counts_where_a_macro_names_one_in_a_way_that_a_scan_does_not_see(workshop, text):
    (workshop.sources / "deep").mkdir()
    inner = workshop.sources / "deep" / "inner.h"
    inner.write_text("int inner;\n")
    one = workshop.spec(include_paths=(workshop.sources,)).key
    workshop.source.write_text(text)
    two = workshop.spec(include_paths=(workshop.sources,)).key
    inner.write_text("int other;\n")
    assert len({one, two, workshop.spec(include_paths=(workshop.sources,)).key}) == 3


@pytest.mark.parametrize("flags", [["-include", "forced.h"], ["-includeforced.h"], ["--include=forced.h"]])
def test_a_header_that_a_flag_includes_changes_the_key(workshop, flags):
    forced = workshop.sources / "forced.h"
    forced.touch()
    one = workshop.spec(include_paths=(workshop.sources,), compile_flags=flags).key
    forced.write_text("int forced;\n")
    assert workshop.spec(include_paths=(workshop.sources,), compile_flags=flags).key != one


def test_a_scan_follows_includes_through_folders_and_macros(tmp_path):
    files = {
        "src/a.cpp": '#include "one.h"\n#include <two.h>\n#include <vector>\n'
        '#define LOOPS "inc/loops.h"\n#include LOOPS\n',
        "src/one.h": '#if 0\n#include "inc/left_out.h"\n#endif\n#include "missing.h"\n',
        "inc/two.h": '#include "beside.h"\n',
        "inc/beside.h": '#include "beside.h"\n',
        "inc/loops.h": "",
        "inc/left_out.h": "",
        "inc/unused.h": "",
        "src/beside.h": "the wrong one\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = scan([tmp_path / "src/a.cpp"], [tmp_path / "inc", tmp_path])
    assert {str(path.relative_to(tmp_path)) for _, path in found.headers} == {
        "src/one.h",
        "inc/two.h",
        "inc/beside.h",
        "inc/loops.h",
        "inc/left_out.h",
    }
    assert found.outside == {"vector", "missing.h"}


@pytest.mark.parametrize(
    ("includes", "uses_torch", "stable"),
    [
        ("#include <vector>\n", False, False),
        ("#include <torch/csrc/stable/library.h>\n#include <torch/headeronly/util/Half.h>\n", True, True),
        ("#include <torch/csrc/stable/library.h>\n#include <ATen/ATen.h>\n", True, False),
        ("#include <torch/extension.h>\n", True, False),
        ("#include <pybind11/pybind11.h>\n", True, False),
    ],
)
def test_the_stable_abi_is_seen(tmp_path, includes, uses_torch, stable):
    source = tmp_path / "a.cpp"
    source.write_text(includes)
    found = scan([source], [])
    assert (found.uses_torch, found.stable_abi) == (uses_torch, stable)


def test_gcc_is_one_compiler_under_its_names(tmp_path):
    for name in ("c++", "g++", "other"):
        compiler = tmp_path / name
        compiler.write_text(f'#!/bin/sh\necho "{name} (Maker) 12"\n')
        compiler.chmod(0o755)
    found = [toolchain.identify((str(tmp_path / name),)).identity for name in ("c++", "g++", "other")]
    assert found == ["(Maker) 12", "(Maker) 12", "other (Maker) 12"]
