"""The hook `ds_comm_backend`: groups over gloo, whichever accelerator was chosen."""

import subprocess
import sys

from ds_ext_cpu import plugin

SCRIPT = """
import deepspeed.comm as dist
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.plugins import Offer, hookimpl, plugin_manager

class Device:
    @hookimpl
    def ds_probe(self):
        return Offer("device", 1000)

    @hookimpl
    def ds_accelerator(self):
        return PlainAccelerator()

plugin_manager().register(Device(), "device")
dist.init_distributed("gloo")
print(type(dist.group_backend()).__name__)
"""


def test_another_accelerators_host_groups_are_served(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "device")
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "ReadingGroup"


def test_other_libraries_are_not_served():
    assert plugin.ds_comm_backend("nccl", "a group") is None
    assert plugin.ds_comm_backend("gloo", None) is None  # nothing for all groups of the process
