"""Each test chooses its accelerator among plugins of its own, and leaves the process's choice as it was."""

import types

import pytest
from deepspeed.accelerator import current
from deepspeed.plugins import ACCELERATORS, Offer, PluginManager, hookimpl


class Shelf:
    """Installed plugins, as a test wants them. `built` counts the calls of each plugin's ds_accelerator."""

    def __init__(self):
        self.entries, self.built = [], {}
        self.manager = PluginManager(lambda group: self.entries if group == ACCELERATORS else [])

    def put(self, name, priority=100, available=True, reason="here", build=None, broken=None, impersonates=""):
        module = types.ModuleType(f"plugin_{name}")
        self.built[name] = 0

        @hookimpl
        def ds_probe():
            return Offer(name, priority, available, reason, impersonates)

        @hookimpl
        def ds_accelerator():
            self.built[name] += 1
            return build()

        module.ds_probe, module.ds_accelerator = ds_probe, ds_accelerator

        def load():
            if broken is not None:
                raise broken
            return module

        entry = types.SimpleNamespace(name=name, value=f"{name}.plugin", dist=None, load=load)
        self.entries.append(entry)


@pytest.fixture
def shelf(monkeypatch):
    """An empty shelf of plugins, nothing chosen and no DS_ACCELERATOR."""
    shelf = Shelf()
    monkeypatch.setattr(current, "plugin_manager", lambda: shelf.manager)
    monkeypatch.setattr(current, "_choice", None)
    monkeypatch.setattr(current, "installed", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("DS_PLUGINS_BLOCK", raising=False)
    return shelf


@pytest.fixture
def warned(monkeypatch):
    """The warnings of the choice."""
    messages = []
    monkeypatch.setattr("deepspeed.accelerator.current.logger.warning", messages.append)
    monkeypatch.setattr("deepspeed.accelerator.current.warn_once", messages.append)
    return messages
