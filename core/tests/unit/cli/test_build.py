"""ds_build compiles what the first use would, says one line per op, and tells by its exit code what is missing."""

import pytest
from deepspeed.accelerator import current, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.cli import build
from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder import OpBuilder

MODULE = """
#include <Python.h>
#define JOIN(name) PyInit_##name
#define INIT(name) JOIN(name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "op", "", -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


class TransformerBuilder(OpBuilder):
    source = ""

    def __init__(self):
        super().__init__("transformer")

    def absolute_name(self):
        return "nowhere.transformer_op"

    def sources(self):
        return [self.source]


class RandomLTDBuilder(TransformerBuilder):
    def jit_load(self, verbose=True):
        return object()


class SparseAttnBuilder(TransformerBuilder):
    def load(self, verbose=True):
        raise OpUnavailable("no licence")


BUILDERS = {kind.__name__: kind for kind in (TransformerBuilder, RandomLTDBuilder, SparseAttnBuilder)}


class Vendor(PlainAccelerator):
    def get_op_builder(self, class_name):
        return BUILDERS.get(class_name)

    def create_op_builder(self, class_name):
        return BUILDERS[class_name]() if class_name in BUILDERS else None


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    source = tmp_path / "op.cpp"
    source.write_text(MODULE)
    for kind in BUILDERS.values():
        monkeypatch.setattr(kind, "source", str(source))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    before = current.installed
    set_accelerator(Vendor())
    yield tmp_path / "ops"
    monkeypatch.setattr(current, "installed", before)


def test_builds_without_loading(vendor, capsys, monkeypatch):
    from deepspeed.ops.op_builder import loading

    monkeypatch.setattr(loading, "load_module", None)
    assert build.main(["transformer"]) == 0
    (library,) = vendor.glob("transformer_*/*.so")
    line = capsys.readouterr().out
    assert line.startswith("transformer: built")
    assert line.endswith(f": {library}\n")


def test_a_builder_that_compiles_by_itself(vendor, capsys):
    assert build.main(["random_ltd"]) == 0
    assert "random_ltd: loaded: " in capsys.readouterr().out


def test_a_failure_and_a_missing_kernel_are_exit_code_1(vendor, capsys):
    assert build.main(["sparse_attn"]) == 1
    assert capsys.readouterr().out == "sparse_attn: failed: no licence\n"
    assert build.main(["gds"]) == 1
    assert capsys.readouterr().out.startswith("gds: reference: ")


def test_an_unknown_name_is_exit_code_2(vendor, capsys):
    assert build.main(["transfomer"]) == 2
    assert "did you mean 'transformer'" in capsys.readouterr().err


def test_list_compiles_nothing(vendor, capsys):
    assert build.main(["--list", "transformer", "gds"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("transformer: device: ")
    assert second.startswith("gds: reference: ")
    assert not vendor.exists()


def test_all_of_them(vendor, capsys, monkeypatch):
    monkeypatch.setattr(build.registry, "op_names", lambda: ["transformer", "gds"])
    assert build.main([]) == 0  # gds has no kernel, and nobody asked for it
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["transformer"]
