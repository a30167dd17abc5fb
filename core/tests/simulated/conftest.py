"""Warm ranks on the simulated device and on the cpu accelerator.

PrivateUse1 is one per process and for good, so that nothing of it happens in the process of the tests.
"""

import functools
import os
import subprocess
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
def python(warm_python):
    """A `python` whose processes are forks of one that has imported torch, and has no device yet."""
    return str(warm_python() / "python")


@pytest.fixture(scope="session")
def installed(tmp_path_factory, python):
    """The environment in which the extension is installed, and its library built."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "ds_ext_sim-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-ext-sim\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[deepspeed.accelerators]\nsim = ds_ext_sim.plugin\n")
    path = os.pathsep.join([str(site), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "DS_OPS_DISABLE": "all"}
    subprocess.run([python, "-c", BUILD], env={**os.environ, **environment}, check=True, timeout=280)
    return environment


def _ranks(world_size, accelerator):
    """`ranks(fn, ...)` runs a function of a test file on every rank and returns their answers."""

    @pytest.fixture(scope="session")
    def ranks(installed):
        environment = {**installed, "DS_ACCELERATOR": accelerator}
        return functools.partial(run_ranks, world_size, timeout_s=200, environment=environment)

    return ranks


sim, sim_ranks, cpu, cpu_ranks = _ranks(1, "sim"), _ranks(2, "sim"), _ranks(1, "cpu"), _ranks(2, "cpu")


def outcomes(fault, tests, folder, words=""):
    """On a rank: what tests come to with a planted fault, or without (None); name -> (outcome, reason) of its cases."""
    import os
    from pathlib import Path

    import planted_faults
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.testing.recording import Recorder

    os.environ.pop("DS_OPS_DISABLE", None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each fault is a session of pytest: a short one
    if fault is not None:
        set_accelerator(planted_faults.make(fault))
    get_accelerator()
    names = ", ".join(("accelerator", "device", "ds_undisturbed", *tests))
    file = Path(folder) / f"test_on_{fault or 'an_honest_device'}.py"  # a module is imported once, by its name
    file.write_text(f"from deepspeed.testing.suite import {names}\n")
    Path(folder, "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-c", f"{folder}/pytest.ini", "--import-mode=importlib"]
    for plugin in ("cacheprovider", "unraisableexception", "threadexception"):  # two of them collect garbage twice
        options += ["-p", f"no:{plugin}"]
    recorder = Recorder()
    pytest.main([*options, *(["-k", words] if words else []), str(file)], plugins=[recorder])
    found = {}
    for test in recorder.tests.values():
        found.setdefault(test["name"].partition("[")[0], []).append((test["outcome"], test["reason"]))
    return found


@pytest.fixture(scope="session")
def on_device(sim):
    """`on_device(fault, tests, folder, words)`: `outcomes` of one rank on the simulated device."""
    return lambda *args: sim(outcomes, *args)[0]
