"""The layout of Intel's extension loads and builds against this core.

Its parts, as its documentation has them: a base builder that overrides `jit_load` and `builder`, `sycl_kernel_path`
that returns a path, sources in the package, a placeholder for ops it lacks. The package is `intel_style/
ds_intel_style`; its compiler is the stand-in of `conftest.py`, so that the operator is really built and run.
"""

import shutil
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.ops import registry

PACKAGE = Path(__file__).parent / "intel_style"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with the package, as pip would have it."""
    return shutil.copytree(PACKAGE, tmp_path_factory.mktemp("site") / "site", dirs_exist_ok=True)


@pytest.fixture
def vendor(package, icpx, monkeypatch, needs_stable_abi):
    """The vendor's accelerator, in force."""
    monkeypatch.syspath_prepend(package)
    from ds_intel_style.accelerator import XPU_Accelerator

    before = get_accelerator()
    set_accelerator(XPU_Accelerator())
    registry.reset()
    icpx.install()
    yield get_accelerator()
    set_accelerator(before)
    registry.reset()


def check(step):
    param, grad = torch.ones(7), torch.arange(7.0)
    step(param, grad, 0.5)
    assert torch.equal(param, 1 - 0.5 * grad)


def listing(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.suffix != ".pyc"}


def test_an_op_of_its_own_base_builder_is_built_by_its_own_means(vendor, package, icpx):
    before = {path for path in listing(package) if path.name != "__pycache__"}
    builder = vendor.create_op_builder("FusedAdamBuilder")
    assert builder.is_compatible()
    assert [Path(path).is_relative_to(package) for path in builder.strip_empty_entries(builder.sources())] == [True]
    check(builder.load().step_)
    (call,) = icpx.calls()
    assert {"-fsycl", "-shared", str(package / "ds_intel_style/csrc/adam/fused_adam.cpp")} <= set(call)
    major, minor = torch.__version__.split(".")[:2]
    assert f"-DTORCH_VERSION_SEEN={int(major) * 100 + int(minor)}" in call
    assert {path for path in listing(package) if path.name != "__pycache__"} == before


def test_an_op_of_the_cores_builder_is_built_by_the_core(vendor, package, icpx):
    check(vendor.create_op_builder("CPUAdamBuilder").load().step_)
    assert icpx.calls() == []  # by the C++ compiler


def test_a_wheel_asks_its_builder(vendor):
    extension = vendor.create_op_builder("FusedAdamBuilder").builder()
    assert extension.name == "ds_intel_style.ops.adam.fused_adam_op"
    assert all(Path(path).is_file() for path in extension.sources)
    assert "-fsycl" in extension.extra_compile_args


def test_the_registry_says_whose_op_it_is_and_passes_the_placeholder_by(vendor):
    found = registry.resolve("fused_adam")
    assert (found.source, type(found.builder).__module__) == ("device", "ds_intel_style.op_builder.fused_adam")
    assert registry.resolve("quantizer").source != "device"
