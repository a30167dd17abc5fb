"""The extension as the core finds it."""

import subprocess
import sys
from pathlib import Path

import ds_ext_mps.plugin as door
import pytest
from deepspeed.plugins import ACCELERATORS, PluginManager

PROJECT = Path(__file__).parents[1]


class Entry:
    name, value, dist = "mps", "ds_ext_mps.plugin", None

    @staticmethod
    def load():
        return door


@pytest.fixture
def manager():
    return PluginManager(lambda group: [Entry] if group == ACCELERATORS else [])


def test_the_entry_point_is_announced():
    project = (PROJECT / "pyproject.toml").read_text()
    assert '[project.entry-points."deepspeed.accelerators"]\nmps = "ds_ext_mps.plugin"\n' in project
    assert 'dependencies = ["ds-core>=0.1"]\n' in project


@pytest.mark.parametrize(
    ("system", "chip", "available"),
    [("darwin", "arm64", True), ("darwin", "x86_64", False), ("linux", "arm64", False), ("linux", "x86_64", False)],
)
def test_a_mac_with_an_apple_chip_has_the_device(manager, monkeypatch, system, chip, available):
    monkeypatch.setattr(door.sys, "platform", system)
    monkeypatch.setattr(door.platform, "machine", lambda: chip)
    offer = manager.probe("mps")
    assert (offer.name, offer.priority, offer.available) == ("mps", 100, available)
    assert offer.reason == f"{system} on {chip}; Metal needs darwin on arm64"


def test_the_core_builds_the_accelerator(manager, metal):
    accelerator = manager.build_accelerator("mps")
    assert accelerator.device_name() == "mps"
    assert manager.op_builders("mps") == {}


def test_the_door_imports_no_torch():
    code = "import sys, ds_ext_mps.plugin as p; p.ds_probe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
