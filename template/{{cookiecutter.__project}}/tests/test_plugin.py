"""The extension as the core finds it: its entry point, its offer, its accelerator."""

import importlib.metadata
import subprocess
import sys

from deepspeed.plugins import ACCELERATORS, PluginManager

NAME = "{{ cookiecutter.device_name }}"


def test_the_entry_point_is_installed():
    (entry,) = importlib.metadata.entry_points(group=ACCELERATORS, name=NAME)
    assert entry.value == "{{ cookiecutter.__package }}.plugin"


def test_the_core_finds_it_probes_it_and_builds_it():
    manager = PluginManager()
    offer = manager.probe(NAME)
    assert (offer.name, offer.available) == (NAME, True), offer.reason
    assert type(manager.build_accelerator(NAME)).__name__ == "{{ cookiecutter.__NAME }}_Accelerator"


def test_the_door_imports_no_torch():
    code = "import sys, {{ cookiecutter.__package }}.plugin as p; p.ds_probe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
