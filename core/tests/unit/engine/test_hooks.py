"""One feature plugin with every hook of an engine: each is called when, and as often as, its documentation says."""

import pytest
import torch
from deepspeed.checkpoint import TorchStore
from deepspeed.errors import ConfigError
from deepspeed.plugins import FEATURES, hookimpl, plugin_manager
from deepspeed.zero.sharding import Sharding
from torch import nn


class OwnSharding(Sharding):
    """A stage of the plugin's own."""


class Store(TorchStore):
    """A store of the plugin's own."""


class Monitor:
    """Keeps the names of what is written."""

    def __init__(self):
        self.names = set()

    def write_events(self, events):
        self.names.update(name for name, _, _ in events)


class Recorder:
    """Notes each call, and answers the hooks by name."""

    def __init__(self):
        self.calls, self.monitor = [], Monitor()

    @hookimpl
    def ds_check_config(self, config):
        self.calls.append("check_config")
        if config.gradient_clipping == 13:
            raise ConfigError("gradient_clipping: found 13; this plugin is superstitious")

    @hookimpl
    def ds_optimizer(self, name, params, arguments):
        self.calls.append(f"optimizer {name} {arguments}")
        return torch.optim.SGD(params, **arguments) if name == "Mine" else None

    @hookimpl
    def ds_sharding(self, name):
        self.calls.append(f"sharding {name}")
        return OwnSharding if name == "1" else None

    @hookimpl
    def ds_checkpoint_store(self, name, arguments):
        self.calls.append(f"checkpoint_store {name} {arguments}")
        return Store() if name == "mine" else None

    @hookimpl
    def ds_monitor(self, name, arguments):
        self.calls.append(f"monitor {name} {arguments}")
        return self.monitor

    @hookimpl
    def ds_engine_ready(self, engine):
        self.calls.append(f"engine_ready {type(engine).__name__}")

    @hookimpl
    def ds_step_end(self, stats):
        self.calls.append(f"step_end {stats.global_step} {stats.applied}")

    @hookimpl
    def ds_checkpoint_saved(self, directory, tag):
        self.calls.append(f"checkpoint_saved {directory} {tag}")


class Broken:
    """Fails in each event."""

    @hookimpl
    def ds_engine_ready(self, engine):
        raise ValueError("not ready")

    @hookimpl
    def ds_step_end(self):
        raise ValueError("no step")


class LastStage(Sharding):
    """A third stage of the plugin's own."""


class GivesLastStage:
    @hookimpl
    def ds_sharding(self, name):
        return LastStage if name == "3" else None


@pytest.fixture
def add():
    """Makes feature plugins active: `add(name, plugin)`."""
    names = []

    def activate(name, plugin):
        plugin_manager().register(plugin, name, FEATURES)
        plugin_manager().activate(name, FEATURES)
        names.append(name)
        return plugin

    yield activate
    for name in names:
        plugin_manager().unregister(name, FEATURES)


CONFIG = {
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Mine", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "checkpoint": {"store": {"type": "mine", "params": {"bucket": "b"}}},
    "monitor_plugins": {"mine": {"path": "x"}},
}


def test_every_hook_of_an_engine(make_engine, add, tmp_path):
    recorder = add("recorder", Recorder())
    engine = make_engine(nn.Linear(4, 1), **CONFIG)
    assert sorted(recorder.calls[:-1]) == [
        "check_config",
        "checkpoint_store mine {'bucket': 'b'}",
        "monitor mine {'path': 'x'}",
        "optimizer Mine {'lr': 0.5}",
        "sharding 1",
    ]
    assert (recorder.calls[0], recorder.calls[-1]) == ("check_config", "engine_ready DeepSpeedEngine")
    assert type(engine.basic_optimizer) is torch.optim.SGD
    assert type(engine.sharding) is OwnSharding
    assert type(engine.checkpointer.store) is Store

    recorder.calls.clear()
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert recorder.calls == ["step_end 0 True", "step_end 1 True"]
    assert "Train/Samples/train_loss" in recorder.monitor.names

    recorder.calls.clear()
    engine.save_checkpoint(str(tmp_path), tag="a")
    assert recorder.calls == [f"checkpoint_saved {tmp_path} a"]


def test_a_plugin_refuses_a_configuration(make_engine, add):
    add("recorder", Recorder())
    with pytest.raises(ConfigError, match="superstitious"):
        make_engine(nn.Linear(4, 1), gradient_clipping=13.0)


def test_what_no_plugin_knows_is_built_in(make_engine, add):
    add("recorder", Recorder())
    engine = make_engine(nn.Linear(4, 1), optimizer={"type": "Adam", "params": {"lr": 0.5}})
    assert type(engine.checkpointer.store) is TorchStore
    assert engine.sharding.stage == 0
    assert type(engine.sharding) is Sharding


def test_a_plugin_that_fails_in_an_event_is_named_and_the_others_hear_it(make_engine, add, lines):
    add("a broken one", Broken())
    recorder = add("recorder", Recorder())
    add("z broken one", Broken())
    engine = make_engine(nn.Linear(4, 1))
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    assert "engine_ready DeepSpeedEngine" in recorder.calls
    assert "step_end 0 True" in recorder.calls
    warnings = [text for level, text in lines if level == "WARNING"]
    for name in ("a broken one", "z broken one"):
        for event, reason in (("ds_engine_ready", "not ready"), ("ds_step_end", "no step")):
            assert f"plugin 'deepspeed.plugins:{name}' failed in {event}: ValueError: {reason}" in "".join(warnings)


def test_a_plugin_that_becomes_active_between_two_steps_hears_the_second(make_engine, add):
    engine = make_engine(nn.Linear(4, 1))
    for step in range(2):
        if step == 1:
            recorder = add("recorder", Recorder())
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
    assert recorder.calls == ["step_end 1 True"]


def test_a_third_stage_of_a_plugin_gets_the_keys_of_stage_3(single_rank, make_engine, add):
    add("last", GivesLastStage())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 7, "zero_quantized_weights": True}
    engine = make_engine(nn.Linear(4, 2), zero_optimization=zero)
    assert type(engine.sharding) is LastStage
    assert (
        engine.sharding.options.partitioning.persistence_numel,
        engine.sharding.options.partitioning.quantizes_weights,
    ) == (7, True)
