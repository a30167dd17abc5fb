"""ds_report's ops: who serves each, in which state, and why no better place; it compiles only when it is asked to."""

import json
from pathlib import Path

import pytest
from deepspeed.accelerator import current, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.cli import report
from deepspeed.cli.report_parts import build_ops, collect_ops
from deepspeed.ops.op_builder import OpBuilder

MODULE = """
#include <Python.h>
#define JOIN(name) PyInit_##name
#define INIT(name) JOIN(name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "op", "", -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


class _Builder(OpBuilder):
    NAME = "transformer"
    source = ""

    def __init__(self):
        super().__init__(self.NAME)

    def absolute_name(self):
        return f"nowhere.{self.NAME}_op"

    def sources(self):
        return [self.source]


class TransformerBuilder(_Builder):
    pass


class RandomLTDBuilder(_Builder):
    NAME = "random_ltd"

    def is_compatible(self, verbose=False):
        self.reason = "the driver is too old"
        return False


class SparseAttnBuilder(_Builder):
    NAME = "sparse_attn"

    def jit_load(self, verbose=True):
        return object()


class MyGemmBuilder(_Builder):
    NAME = "my_gemm"

    def load(self, verbose=True):
        return object()


@pytest.fixture
def vendor(monkeypatch, tmp_path):
    """An accelerator with four builders, an empty cache, and no plugin."""
    kinds = {kind.__name__: kind for kind in (TransformerBuilder, RandomLTDBuilder, SparseAttnBuilder, MyGemmBuilder)}

    class Vendor(PlainAccelerator):
        def get_op_builder(self, class_name):
            return kinds.get(class_name)

        def _builder_names(self):
            return list(kinds)

    source = tmp_path / "op.cpp"
    source.write_text(MODULE)
    monkeypatch.setattr(_Builder, "source", str(source))
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
    monkeypatch.setenv("DS_PLUGINS_BLOCK", "cpu")
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("DS_OPS_DISABLE", raising=False)
    monkeypatch.setattr(current, "_choice", None)
    monkeypatch.setattr(current, "installed", None)
    set_accelerator(Vendor())
    return source


def rows():
    return {row["op"]: row for row in collect_ops()}


def test_each_op_has_its_row(vendor):
    told = rows()
    here = __name__
    row = told["transformer"]
    assert (row["builder"], row["source"]) == (f"{here}.TransformerBuilder", "device")
    assert (row["state"], row["library"], row["rejected"]) == ("not built", None, [])
    assert (told["sparse_attn"]["state"], told["my_gemm"]["state"]) == ("by itself", "by itself")
    incompatible = told["random_ltd"]
    assert (incompatible["offered"], incompatible["builder"], incompatible["source"]) == (True, None, "reference")
    assert incompatible["rejected"][0] == ["accelerator 'cpu' (Vendor)", "not compatible: the driver is too old"]
    nobodys = told["cpu_adam"]
    assert (nobodys["offered"], nobodys["state"]) == (False, "reference")
    assert nobodys["front"] == "deepspeed.ops.adam.DeepSpeedCPUAdam"
    assert told["async_io"]["front"] is None
    assert "blocked by DS_PLUGINS_BLOCK" in nobodys["rejected"][1][1]


def test_what_a_builder_chose_for_this_machine_is_a_remark(vendor, monkeypatch):
    monkeypatch.setattr(TransformerBuilder, "remark", lambda self: "io_uring, O_DIRECT")
    assert rows()["transformer"]["remark"] == "io_uring, O_DIRECT"
    assert {row["op"]: row for row in build_ops()}["transformer"]["remark"] == "io_uring, O_DIRECT"


def test_build_compiles_once_and_then_it_is_cached(vendor):
    built = {row["op"]: row for row in build_ops()}["transformer"]
    assert built["state"] == "cached"
    assert built["library"].endswith(".so")
    assert rows()["transformer"] == built


def test_a_build_that_fails_is_a_row_and_an_exit_code(vendor, capsys):
    vendor.write_text("#error this cannot be compiled\n")
    assert report.main(["--build", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (row,) = [row for row in told["ops"] if row["op"] == "transformer"]
    assert row["state"] == "failed"
    assert "this cannot be compiled" in row["remark"]
    assert report.main(["--json"]) == 0


def test_a_compilers_error_is_one_line_with_the_log_and_without_the_command(vendor, capsys, monkeypatch):
    vendor.write_text("#error this cannot be compiled\n")
    monkeypatch.setenv("COLUMNS", "80")
    assert report.main(["--build"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("transformer failed: ")]
    assert "#error this cannot be compiled; all of its output is in " in line
    assert "-fPIC" not in line
    assert "-fPIC" in Path(line.rpartition(" ")[2]).read_text()


def test_a_vendors_own_op_that_breaks_is_a_row_under_its_name(vendor, monkeypatch):
    def fail(self, verbose=True):
        raise OSError("driver gone")

    monkeypatch.setattr(MyGemmBuilder, "load", fail)
    row = {row["op"]: row for row in build_ops()}["my_gemm"]
    assert (row["state"], row["remark"]) == ("failed", "driver gone")


def test_a_source_that_is_not_there_is_a_row(vendor):
    vendor.unlink()
    assert rows()["transformer"]["state"] == "failed"
    assert "op.cpp does not exist" in rows()["transformer"]["remark"]


def test_the_table_for_people(vendor, capsys):
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for part in (
        "Ops of this accelerator",
        "not built",
        "by itself",
        "my_gemm",
        "not compatible: the driver is too old",
    ):
        assert part in text
    assert (
        "On their torch reference, as no extension has a kernel for them: cpu_adagrad, cpu_adam, cpu_lion, fused_adam,"
        in text
    )
    assert "Not in this version, as no extension has a kernel for them: async_io," in text
    assert text.count("host extension 'cpu' has none: accelerator 'cpu' is blocked by DS_PLUGINS_BLOCK") == 1
    assert report.main(["--explain-accelerator"]) == 0
    assert "transformer" not in capsys.readouterr().out


def test_disabled_ops_say_so(vendor, monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "transformer")
    row = rows()["transformer"]
    assert row["offered"]
    assert row["rejected"] == [["environment", "disabled by DS_OPS_DISABLE=transformer"]]
