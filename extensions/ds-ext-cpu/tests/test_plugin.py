"""The extension as the core finds it: its entry point, its offer, its accelerator."""

import importlib.metadata
import subprocess
import sys

import ds_ext_cpu.plugin
from deepspeed.plugins import ACCELERATORS, Offer, PluginManager


def test_the_entry_point_is_installed():
    (entry,) = importlib.metadata.entry_points(group=ACCELERATORS, name="cpu")
    assert entry.value == "ds_ext_cpu.plugin"
    assert entry.load() is ds_ext_cpu.plugin


def test_the_core_finds_it_probes_it_and_builds_it():
    manager = PluginManager()
    offer = manager.probe("cpu")
    assert (offer.name, offer.priority, offer.available) == ("cpu", 0, True)
    assert "NUMA node" in offer.reason
    assert type(manager.build_accelerator("cpu")).__name__ == "CPU_Accelerator"


def test_the_door_imports_no_torch():
    code = "import sys, ds_ext_cpu.plugin as p; p.ds_probe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_get_accelerator_answers_cpu_by_name():
    code = (
        "from deepspeed.accelerator import get_accelerator as g;"
        "print(type(g()).__module__, g().device_name(), g().communication_backend_name())"
    )
    import os

    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ds_ext_cpu.accelerator", "cpu", "gloo"]
    assert done.stderr == ""


def test_probe_agrees_with_the_machine(monkeypatch):
    monkeypatch.setattr(ds_ext_cpu.plugin, "usable_nodes", lambda: {0: [0], 1: [1]})
    monkeypatch.setattr(ds_ext_cpu.plugin, "_num_cores", lambda: 2)
    assert ds_ext_cpu.plugin.ds_probe() == Offer("cpu", 0, True, "2 cores on 2 NUMA nodes")
