"""The launcher asks the accelerator in force how many devices there are, and which variable limits them."""

import json
import os
import subprocess
import sys

import pytest

VENDOR = """
from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.plugins import Offer, hookimpl

class GANG_Accelerator(DeepSpeedAccelerator):
    _name, _communication_backend_name = "gang", "gloo"

    def device_count(self):
        return 3

    def is_available(self):
        return True

    def visible_devices_envs(self):
        return ["GANG_VISIBLE_DEVICES"]

@hookimpl
def ds_probe():
    return Offer("gang", 100, reason="3 devices")

@hookimpl
def ds_accelerator():
    return GANG_Accelerator()
"""
REPORT = """
import json, os
names = ("RANK", "WORLD_SIZE", "GANG_VISIBLE_DEVICES")
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump([os.environ.get(name) for name in names], file)
"""


@pytest.fixture
def launch(tmp_path):
    """Runs the `deepspeed` command with the vendor installed; what each rank saw, and the exit code."""
    (tmp_path / "vendor_gang.py").write_text(VENDOR)
    info = tmp_path / "gang-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gang\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepspeed.accelerators]\ngang = vendor_gang\n")
    (tmp_path / "report.py").write_text(REPORT)

    def run(*flags):
        left_out = ("DS_ACCELERATOR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        command = [sys.executable, "-m", "deepspeed.launcher.runner", *flags, "report.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        seen = [
            json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(list(tmp_path.glob("*.json"))))
        ]
        return seen, done

    return run


def test_every_device_gets_a_rank(launch):
    seen, done = launch()
    assert done.returncode == 0, done.stderr
    assert seen == [[str(rank), "3", None] for rank in range(3)]


def test_chosen_devices_are_the_only_visible_ones(launch):
    seen, done = launch("--include", "localhost:0,2")
    assert done.returncode == 0, done.stderr
    assert seen == [[str(rank), "2", "0,2"] for rank in range(2)]


def test_a_device_too_many_is_refused(launch):
    seen, done = launch("--num_accelerators", "4")
    assert (seen, done.returncode != 0) == ([], True)
    assert "asks for 4 devices; found 3 of gang" in done.stderr
