"""A wheel that was built with DS_BUILD_<OP>=1 serves an environment that has no compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[1]
needs_stable_abi = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="the host kernels need torch 2.10"
)


def run(program, **options):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def build(tmp_path, **variables):
    """The wheel, from a copy of the sources, unpacked; returns (file name, folder)."""
    shutil.copytree(PROJECT, tmp_path / "project", ignore=shutil.ignore_patterns("*.egg-info", "build", "*.so"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    program = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    run(program, cwd=tmp_path / "project", env={**kept, **variables})
    (wheel,) = (tmp_path / "project" / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    return wheel.name, tmp_path / "site"


def test_a_plain_wheel_carries_sources_and_no_library(tmp_path):
    name, site = build(tmp_path)
    assert name.endswith("-py3-none-any.whl")
    assert (site / "ds_ext_cpu/csrc/adam/cpu_adam.cpp").is_file()
    assert list(site.rglob("*.so")) == []


@needs_stable_abi
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path):
    name, site = build(tmp_path, DS_BUILD_CPU_LION="1", DS_BUILD_FUSED_LION="1")
    assert "-py3-none-linux_" in name
    assert {path.name for path in site.rglob("*.so")} == {"cpu_lion_op.so", "fused_lion_op.so"}
    (tmp_path / "empty").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("CXX", "HOME")},
        "PATH": str(tmp_path / "empty"),
        "PYTHONPATH": str(site),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
    }
    told = run(
        "import ds_ext_cpu, torch\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "print(ds_ext_cpu.__file__)\n"
        "for name in ('CPULionBuilder', 'FusedLionBuilder', 'CPUAdamBuilder'):\n"
        "    builder = get_accelerator().create_op_builder(name)\n"
        "    print(builder.load().lion_step_.default.name() if builder.is_compatible() else builder.reason)\n",
        env=environment,
        cwd=tmp_path,
    ).splitlines()
    assert told[0] == str(site / "ds_ext_cpu/__init__.py")
    assert told[1:3] == ["ds_cpu::lion_step_", "ds_cpu::lion_step_"]
    assert told[3].startswith("no C++ compiler")
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []
