"""Warm ranks on the simulated device and on the cpu accelerator.

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
BUILD = "from ds_ext_sim.op_builder import SimDeviceBuilder; print(SimDeviceBuilder().prepare())"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def pytest_collection_modifyitems(items):
    if TORCH < (2, 9):
        skip = pytest.mark.skip(reason="the simulated device needs torch 2.9")
        for item in items:
            if item.path.is_relative_to(FOLDER):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The environment in which the extension is installed, and its library built."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "ds_ext_sim-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-ext-sim\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[deepspeed.accelerators]\nsim = ds_ext_sim.plugin\n")
    path = os.pathsep.join([str(site), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "DS_OPS_DISABLE": "all"}
    subprocess.run([sys.executable, "-c", BUILD], env={**os.environ, **environment}, check=True, timeout=280)
    return environment


def _ranks(world_size, accelerator):
    """`ranks(fn, ...)` runs a function of a test file on every rank and returns their answers."""

    @pytest.fixture(scope="session")
    def ranks(installed):
        environment = {**installed, "DS_ACCELERATOR": accelerator}
        return functools.partial(run_ranks, world_size, timeout_s=200, environment=environment)

    return ranks


sim, sim_ranks, cpu, cpu_ranks = _ranks(1, "sim"), _ranks(2, "sim"), _ranks(1, "cpu"), _ranks(2, "cpu")
