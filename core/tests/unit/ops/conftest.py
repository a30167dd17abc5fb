"""Accelerators and plugins with op builders made for the test; the process's own are put back."""

import types

import pytest
from deepspeed.accelerator import building, current, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.ops import implementations, registry
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.plugins import ACCELERATORS, FEATURES, Offer, PluginManager, hookimpl


class Kernel(str):
    """A loaded op that has every operator that fronts call, and equals its name."""

    def __getattr__(self, name):
        if name.endswith("_step_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


class Builders:
    """Plugins, builder classes, and who is asked; everything is made without a compiler."""

    def __init__(self):
        self.entries = {ACCELERATORS: [], FEATURES: []}
        self.manager = PluginManager(lambda group: self.entries[group])

    def make(self, op, result="kernel", *, compatible=True, reason=None, parent=OpBuilder, class_name=None):
        """A builder class whose `load()` returns `result`, or raises it; a text becomes an op with every operator."""
        if isinstance(result, str):
            result = Kernel(result)

        class Made(parent):
            NAME = op
            loads = 0

            def __init__(self):
                super().__init__(op)

            def absolute_name(self):
                return f"test.{op}"

            def sources(self):
                return []

            def is_compatible(self, verbose=False):
                self.reason = reason
                if isinstance(compatible, Exception):
                    raise compatible
                return compatible

            def load(self, verbose=True):
                type(self).loads += 1
                if isinstance(result, Exception):
                    raise result
                return result

        Made.__name__ = Made.__qualname__ = class_name or registry.OPS[op].builder
        return Made

    def plugin(self, name, builders, group=ACCELERATORS, accelerator=PlainAccelerator, priority=0):
        """An installed plugin that offers an accelerator and `builders`, a list of classes or what to raise."""
        module = types.ModuleType(f"plugin_{name}")

        @hookimpl
        def ds_op_builders():
            if isinstance(builders, Exception):
                raise builders
            return {kind.__name__: kind for kind in builders}

        @hookimpl
        def ds_accelerator():
            return accelerator()

        module.ds_op_builders, module.ds_accelerator = ds_op_builders, ds_accelerator
        module.ds_probe = hookimpl(lambda: Offer(name, priority))
        self.entries[group].append(types.SimpleNamespace(name=name, value=name, dist=None, load=lambda: module))

    def accelerator(self, *kinds, name="sim"):
        """The class of an accelerator that is set by hand and has these builders itself."""
        found = {kind.__name__: kind for kind in kinds}

        class XYZ_Accelerator(PlainAccelerator):
            _name = name

            def get_op_builder(self, class_name):
                return found.get(class_name)

            def _builder_names(self):
                return sorted(found)

        return XYZ_Accelerator


@pytest.fixture
def builders(monkeypatch):
    """No plugin, the plain accelerator current, nothing loaded."""
    made = Builders()
    for module in (building, current, implementations):
        monkeypatch.setattr(module, "plugin_manager", lambda: made.manager)
    monkeypatch.setattr(current, "_choice", None)
    monkeypatch.setattr(current, "installed", None)
    monkeypatch.setattr(registry, "_logged", set())
    for variable in ("DS_ACCELERATOR", "DS_PLUGINS_BLOCK", "DS_OPS_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    registry.reset()
    set_accelerator(PlainAccelerator())
    yield made
    registry.reset()
