"""Warm ranks on the stand-in for the vendor's package, and on core's plain device.

PrivateUse1 is one per process and for good, so that nothing of it happens in the process of the tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.testing.distributed import RankPool

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "src"
SIMULATED = FOLDER.parents[2] / "core" / "tests" / "simulated"
BUILD = "from ds_ext_sim.op_builder import SimDeviceBuilder; SimDeviceBuilder().prepare()"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Ranks:
    """`ranks(fn, ...)` runs a function of a test file on every rank and returns their answers."""

    def __init__(self, world_size, environment):
        self.world_size, self.environment, self.pool = world_size, environment, None

    def __call__(self, fn, *args, timeout_s=200):
        if self.pool is None or not self.pool.is_usable:
            before = dict(os.environ)
            os.environ.update(self.environment)
            try:
                self.pool = RankPool(self.world_size)
            finally:
                os.environ.clear()
                os.environ.update(before)
        return self.pool.run(fn, args, timeout_s)

    def end(self):
        if self.pool is not None:
            self.pool.kill()


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
    @pytest.fixture(scope="session")
    def ranks(installed):
        made = Ranks(world_size, {**installed, "DS_ACCELERATOR": accelerator, **more})
        yield made
        made.end()

    return ranks


npu, npu_ranks = _ranks(1, "npu"), _ranks(2, "npu")
cpu, cpu_ranks = _ranks(1, "plain", DS_OPS_DISABLE="all"), _ranks(2, "plain", DS_OPS_DISABLE="all")
