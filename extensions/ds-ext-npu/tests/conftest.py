"""Warm ranks on the stand-in for the vendor's package, and on core's plain device.

PrivateUse1 is one per process and for good, so that nothing of it happens in the process of the tests.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.testing.distributed import run_ranks

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "src"
SIMULATED = FOLDER.parents[2] / "core" / "tests" / "simulated"
BUILD = "from ds_ext_sim.op_builder import SimDeviceBuilder; SimDeviceBuilder().prepare()"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The environment in which the extension and the stand-in are installed, and the simulated device is built."""
    if TORCH < (2, 9):
        pytest.skip("the simulated device needs torch 2.9")
    if not SIMULATED.is_dir():
        pytest.skip(f"the simulated device is no part of this package; {SIMULATED} has it")
    site = tmp_path_factory.mktemp("site")
    metadata = site / "ds_ext_npu-1.0.dist-info"  # stands before the extension's own, if that is installed
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-ext-npu\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[deepspeed.accelerators]\nnpu = npu_door\n")
    folders = [site, FOLDER / "standin", SOURCE, SIMULATED, os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
    subprocess.run([sys.executable, "-c", BUILD], env={**os.environ, **environment}, check=True, timeout=280)
    return environment


def _ranks(world_size, accelerator, **more):
    """`ranks(fn, ...)` runs a function of a test file on every rank and returns their answers."""

    @pytest.fixture(scope="session")
    def ranks(installed):
        environment = {**installed, "DS_ACCELERATOR": accelerator, **more}
        return functools.partial(run_ranks, world_size, timeout_s=200, environment=environment)

    return ranks


npu, npu_ranks = _ranks(1, "npu"), _ranks(2, "npu")
cpu, cpu_ranks = _ranks(1, "plain", DS_OPS_DISABLE="all"), _ranks(2, "plain", DS_OPS_DISABLE="all")
