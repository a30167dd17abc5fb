"""The launcher asks the current accelerator how many devices there are, and which variable limits them.

Two vendors are installed, neither of whom the core knows: `band` offers more, `gang` is what `DS_ACCELERATOR` can name.
"""

import json
import os
import subprocess
import sys

import pytest

VENDOR = """
from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.plugins import Offer, hookimpl

class VENDOR_Accelerator(DeepSpeedAccelerator):
    _name, _communication_backend_name = "{name}", "gloo"

    def device_count(self):
        return {count}

    def is_available(self):
        return True

    def visible_devices_envs(self):
        return ["{name}_VISIBLE_DEVICES".upper()]

@hookimpl
def ds_probe():
    return Offer("{name}", {priority}, reason="{count} devices")

@hookimpl
def ds_accelerator():
    import torch
    torch.utils.rename_privateuse1_backend("{name}")  # as the vendor's package would
    return VENDOR_Accelerator()
"""
REPORT = """
import json, os
from deepspeed.accelerator import get_accelerator
names = ("RANK", "WORLD_SIZE", "GANG_VISIBLE_DEVICES", "BAND_VISIBLE_DEVICES")
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump([get_accelerator().device_name(), *(os.environ.get(name) for name in names)], file)
"""


@pytest.fixture
def command(tmp_path, python):
    """Runs a module of deepspeed as its command, with the vendors installed."""
    for name, count, priority in (("gang", 3, 100), ("band", 2, 200)):
        (tmp_path / f"vendor_{name}.py").write_text(VENDOR.format(name=name, count=count, priority=priority))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{name} = vendor_{name}\n")

    def run(module, *flags, **variables):
        left_out = ("DS_ACCELERATOR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.run(
            [python, "-m", module, *flags],
            cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def launch(command, tmp_path):
    """Launches a script; what each rank saw, and the process that ended."""
    (tmp_path / "report.py").write_text(REPORT)

    def run(*flags, **variables):
        done = command("deepspeed.launcher.runner", *flags, "report.py", **variables)
        seen = [
            json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(list(tmp_path.glob("*.json"))))
        ]
        return seen, done

    return run


def test_every_device_of_the_best_offer_gets_a_rank(launch):
    seen, done = launch()
    assert done.returncode == 0, done.stderr
    assert seen == [["band", str(rank), "2", None, None] for rank in range(2)]


def test_every_device_of_the_named_one_gets_a_rank_and_the_ranks_run_on_it(launch):
    seen, done = launch(DS_ACCELERATOR="gang")
    assert done.returncode == 0, done.stderr
    assert seen == [["gang", str(rank), "3", None, None] for rank in range(3)]


def test_chosen_devices_are_the_only_visible_ones_by_its_own_variable(launch):
    seen, done = launch("--include", "localhost:0,2", DS_ACCELERATOR="gang")
    assert done.returncode == 0, done.stderr
    assert seen == [["gang", str(rank), "2", "0,2", None] for rank in range(2)]


def test_a_device_too_many_is_refused(launch):
    seen, done = launch("--num_accelerators", "4", DS_ACCELERATOR="gang")
    assert (seen, done.returncode != 0) == ([], True)
    assert "asks for 4 devices; found 3 of gang" in done.stderr


def test_the_report_is_of_the_named_one(command):
    done = command("deepspeed.cli.report", "--json", DS_ACCELERATOR="gang")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["chosen"]["name"] == report["chosen"]["plugin"] == "gang"
    assert report["device"]["device_count"] == 3
    verdicts = {row["name"]: row["verdict"] for row in report["accelerators"]}
    assert verdicts["gang"] == "won: DS_ACCELERATOR=gang"
    assert verdicts["band"] == "lost: DS_ACCELERATOR=gang beats every offer"
