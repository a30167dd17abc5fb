"""SYCLOpBuilder: which compiler it takes, what it asks of it, and what is said where it cannot be had."""

import logging
import re
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.errors import OpUnavailable
from deepspeed.ops import registry
from ds_ext_xpu.accelerator import XPU_Accelerator
from ds_ext_xpu.op_builder import SYCLOpBuilder, builders, sycl_compiler, sycl_kernel_include, sycl_kernel_path
from ds_ext_xpu.op_builder.sycl_compiler import find_icpx

OPERATOR = """
#include <torch/csrc/stable/library.h>
#include "twice.h"
static int64_t twice(int64_t number) { return number * kFactor; }
STABLE_TORCH_LIBRARY_FRAGMENT(ds_xpu_twice, m) { m.def("twice(int number) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(ds_xpu_twice, CompositeExplicitAutograd, m) { m.impl("twice", TORCH_BOX(&twice)); }
"""


@pytest.fixture
def torch_xpu(monkeypatch):
    """torch is an XPU build, of the year 2025."""
    monkeypatch.setattr(sycl_compiler, "xpu_of_torch", lambda: ("20250302", "torch 2.13.0+xpu"))


@pytest.fixture
def twice(tmp_path):
    """A builder of a small C++ operator."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/twice.h").write_text("constexpr int kFactor = 2;\n")
    (tmp_path / "twice.cpp").write_text(OPERATOR)

    class TwiceBuilder(SYCLOpBuilder):
        BUILD_VAR, NAME, op_namespace = "DS_BUILD_TWICE", "twice", "ds_xpu_twice"

        def sources(self):
            return [str(tmp_path / "twice.cpp")]

        def include_paths(self):
            return [str(tmp_path / "include")]

    return TwiceBuilder


def test_an_operator_is_built_and_loaded_and_the_second_builder_compiles_nothing(
    icpx, torch_xpu, twice, needs_stable_abi
):
    icpx.install()
    assert twice().is_compatible()
    assert twice().load().twice(21) == 42
    compile_call, link_call = icpx.calls()
    assert twice().load().twice(4) == 8
    assert len(icpx.calls()) == 2
    exact = ("-fp-model=precise", "-foffload-fp32-prec-div", "-foffload-fp32-prec-sqrt")
    assert {"-fsycl", "-fsycl-targets=spir64", "-fno-sycl-id-queries-fit-in-int", "-c", *exact} <= set(compile_call)
    assert any(flag.startswith("-DTORCH_TARGET_VERSION=") for flag in compile_call)
    assert {"-shared", "-fsycl", "-fsycl-targets=spir64", "-ltorch_xpu"} <= set(link_call)


def test_gpus_named_in_advance_are_compiled_for(icpx, torch_xpu, twice, monkeypatch, needs_stable_abi):
    icpx.install()
    before = twice().describe().key
    monkeypatch.setenv("TORCH_XPU_ARCH_LIST", "pvc,bmg")
    spec = twice().describe()
    assert "-fsycl-targets=spir64_gen,spir64" in spec.compile_flags
    assert spec.link_flags[:4] == (
        *("-fsycl", "-fsycl-targets=spir64_gen,spir64"),
        *("-Xsycl-target-backend=spir64_gen", "-device pvc,bmg"),
    )
    assert spec.key != before


# ----- which compiler ------------------------------------------------------------------------------------------------


def test_the_compiler_is_looked_for_where_oneapi_puts_it(icpx, tmp_path):
    with pytest.raises(OpUnavailable, match=r"no SYCL compiler: icpx is not on PATH, not in CMPLR_ROOT \(not set\)"):
        find_icpx({"PATH": str(icpx.folder)}, default=tmp_path / "none")
    path = icpx.install()
    on_path = find_icpx({"PATH": str(icpx.folder)}, default=tmp_path / "none")
    assert on_path.command == (str(path),)
    assert "2025.3.2" in on_path.identity
    assert find_icpx({"PATH": ""}, default=icpx.folder).command == (str(path),)
    (tmp_path / "root").mkdir()
    (tmp_path / "root/bin").symlink_to(icpx.folder)
    in_root = find_icpx({"PATH": "", "CMPLR_ROOT": str(tmp_path / "root")}, default=tmp_path / "none")
    assert in_root.command == (str(tmp_path / "root/bin/icpx"),)


@pytest.mark.parametrize("kind", sorted(builders()))
def test_without_a_compiler_the_reason_says_what_to_install(icpx, torch_xpu, monkeypatch, kind, needs_stable_abi):
    monkeypatch.setattr("ds_ext_xpu.op_builder.sycl_op_builder.find_icpx", lambda: find_icpx({"PATH": ""}, Path("/no")))
    builder = builders()[kind]()
    assert not builder.is_compatible()
    assert "install Intel oneAPI DPC++ and source its setvars.sh" in builder.reason
    with pytest.raises(OpUnavailable, match="no SYCL compiler"):
        builder.load()


def test_a_compiler_of_another_year_than_torchs_is_refused(icpx, torch_xpu, needs_stable_abi):
    path = icpx.install(year=2026)
    builder = builders()["FusedAdamBuilder"]()
    assert not builder.is_compatible()
    assert builder.reason == (
        f"{path} is of 2026.3, and torch 2.13.0+xpu was built with SYCL of 2025: their runtimes do not work in one "
        "process; install oneAPI DPC++ 2025"
    )


@pytest.mark.skipif(getattr(torch.version, "xpu", None) is not None, reason="this torch is an XPU build")
def test_a_torch_without_xpu_is_the_reason(icpx, needs_stable_abi):
    icpx.install()
    builder = builders()["QuantizerBuilder"]()
    assert not builder.is_compatible()
    assert "is built without XPU" in builder.reason


def test_the_front_falls_back_with_one_line(icpx, torch_xpu, monkeypatch, caplog, needs_stable_abi):
    monkeypatch.setattr("ds_ext_xpu.op_builder.sycl_op_builder.find_icpx", lambda: find_icpx({"PATH": ""}, Path("/no")))
    lines = []
    monkeypatch.setattr(registry, "log_dist", lambda line, level=logging.INFO: lines.append((line, level)))
    monkeypatch.setattr(registry, "_logged", set())
    before = get_accelerator()
    set_accelerator(XPU_Accelerator())
    registry.reset()
    try:
        assert registry.kernel("fused_adam") is None
        assert registry.kernel("fused_adam") is None
    finally:
        set_accelerator(before)
        registry.reset()
    ((line, level),) = lines
    assert level == logging.WARNING
    assert line.startswith("op 'fused_adam' runs on its torch reference (")
    assert "no SYCL compiler: icpx is not on PATH" in line


# ----- its sources ---------------------------------------------------------------------------------------------------


def test_sources_lie_in_the_package_by_either_way_of_naming_them():
    path = Path(sycl_kernel_path("adam/fused_adam.cpp"))
    assert path.is_absolute()
    assert str(path) == sycl_kernel_path("csrc/adam/fused_adam.cpp")
    assert Path(sycl_kernel_include("common")) == path.parents[1] / "common"
    with pytest.raises(OpUnavailable, match="there is no file"):
        sycl_kernel_path("adam/none.cpp")


@pytest.mark.parametrize("kind", sorted(builders()))
def test_every_builder_names_its_sources_and_reads_torch_through_the_stable_abi(
    icpx, torch_xpu, kind, needs_stable_abi
):
    icpx.install()
    spec = builders()[kind]().describe()
    assert [source.is_file() for source in spec.sources] == [True]
    assert spec.stable_abi
    assert {name for name, _ in spec.includes.headers} >= {"common/check.h", "common/device.h", "common/kernel.h"}
    outside = {name for name in spec.includes.outside if not name.startswith(("torch/", "sycl/"))}
    assert not any("/" in name for name in outside), outside


def test_a_tensor_on_another_gpu_is_told_beside_which_one_it_must_be():
    csrc = Path(sycl_kernel_include("common")).parent
    texts = [path.read_text() for path in sorted(csrc.rglob("*")) if path.suffix in (".h", ".cpp")]
    sources = " ".join(" ".join(texts).split())  # whatever the lines are broken at
    assert '" as " + model_name + " is"' in sources  # seen only where there are two GPUs
    models = re.findall(r'check_beside\([^;]*, "([^;]+)"\);', sources)
    assert set(models) == {"x", "q", "params", "params[0]"}
