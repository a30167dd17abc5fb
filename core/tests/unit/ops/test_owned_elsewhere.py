"""Op builders for a device that another distribution owns: a feature plugin brings them, and says for which device."""

import types

import pytest
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.ops import registry
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.plugins import ACCELERATORS, FEATURES, Offer, hookimpl


class FusedAdamBuilder(OpBuilder):
    """For the device `meta` alone, which torch knows."""

    def __init__(self):
        super().__init__("fused_adam")

    def absolute_name(self):
        return "other.fused_adam"

    def sources(self):
        return []

    def is_compatible(self, verbose=False):
        name = get_accelerator()._name
        self.reason = f"made for 'meta', and {name!r} is in force"
        return name == "meta"

    def load(self, verbose=True):
        return types.SimpleNamespace(adam_step_=lambda *args, **kwargs: "the other distribution's")


class OwnOpBuilder(FusedAdamBuilder):
    """An op that the core does not know."""

    NAME = "own_op"


@pytest.fixture
def other(builders):
    """The device `xyz` of one distribution, without builders, and another distribution that has some for it."""
    owner, others = types.ModuleType("owner"), types.ModuleType("others")

    @hookimpl
    def ds_accelerator():
        return builders.accelerator(name="meta")()

    @hookimpl
    def ds_op_builders():
        return {"FusedAdamBuilder": FusedAdamBuilder, "OwnOpBuilder": OwnOpBuilder}

    owner.ds_probe, owner.ds_accelerator = hookimpl(lambda: Offer("xyz", 100)), ds_accelerator
    others.ds_op_builders = ds_op_builders
    for name, group, module in (("xyz", ACCELERATORS, owner), ("xyz-ops", FEATURES, others)):
        load = types.MethodType(lambda self: self.module, types.SimpleNamespace(module=module))
        builders.entries[group].append(types.SimpleNamespace(name=name, value=name, dist=None, load=load))
    reset_accelerator()
    return builders


def test_the_device_in_force_gets_the_others_builders(other):
    assert get_accelerator()._name == "meta"
    resolution = registry.resolve("fused_adam")
    assert (resolution.source, type(resolution.builder)) == ("plugin", FusedAdamBuilder)
    assert registry.kernel("fused_adam").adam_step_() == "the other distribution's"
    assert "own_op" in registry.op_names()
    assert registry.kernel("own_op").adam_step_() == "the other distribution's"


def test_another_device_does_not(other):
    set_accelerator(PlainAccelerator())
    resolution = registry.resolve("fused_adam")
    assert resolution.source == "reference"
    assert "plugin 'xyz-ops': not compatible: made for 'meta', and 'cpu' is in force" in resolution.why()
    assert registry.kernel("fused_adam") is None


@pytest.mark.parametrize(("variable", "value"), [("DS_PLUGINS_BLOCK", "xyz-ops"), ("DS_PLUGINS_AUTOLOAD", "0")])
def test_a_plugin_that_is_kept_out_brings_nothing_and_is_no_fault(other, monkeypatch, variable, value):
    monkeypatch.setenv("DS_ACCELERATOR", "xyz")
    monkeypatch.setenv(variable, value)
    resolution = registry.resolve("fused_adam")
    assert resolution.source == "reference"
    assert not resolution.broken
    assert f"plugin 'xyz-ops' is {'blocked by' if value == 'xyz-ops' else 'not loaded because of'} {variable}" in (
        resolution.why()
    )
