"""What a wheel carries, and what an installed one does on a machine without a GPU."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[1]
CHOOSE = "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_name())"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def run(program, **options):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=280, **options
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder into which the wheel was unpacked; built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(PROJECT, folder / "project", ignore=shutil.ignore_patterns("*.egg-info", "build", "*.so"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    program = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = run(program, cwd=folder / "project", env=kept)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "project" / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def installed(site, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "CUDA_"))}
    return {**kept, "PYTHONPATH": str(site), **variables}


def test_a_wheel_carries_every_source_and_no_library(site):
    wanted = {path.relative_to(PROJECT / "src") for path in (PROJECT / "src/ds_ext_cuda/csrc").rglob("*.*")}
    assert wanted <= {path.relative_to(site) for path in site.rglob("*.*")}
    assert (site / "ds_ext_cuda/py.typed").is_file()
    assert list(site.rglob("*.so")) == []


@without_gpu
def test_without_a_device_another_accelerator_is_taken(site):
    done = run(CHOOSE, env=installed(site))
    assert (done.returncode, done.stdout.strip()) == (0, "cpu"), done.stderr


@without_gpu
def test_asked_for_by_name_it_says_why_not(site):
    done = run(CHOOSE, env=installed(site, DS_ACCELERATOR="cuda"))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("deepspeed.errors.PluginError: DS_ACCELERATOR=cuda: that accelerator cannot be used here: ")
    assert "no NVIDIA device here" in last or "built without CUDA" in last


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_an_op_asked_for_without_cuda_says_why_not(site):
    code = "from ds_ext_cuda.op_builder import FusedAdamBuilder as B; b = B(); print(b.is_compatible(), b.reason)"
    done = run(code, env=installed(site))
    assert done.stdout.startswith("False torch "), done.stderr
    assert "is built without CUDA" in done.stdout
