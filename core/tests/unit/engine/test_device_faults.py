"""`watch.device_faults_every`: a count that has risen is warned about once, by the rank whose device it is."""

import platform

import deepspeed
import pytest
import torch
from deepspeed.config.monitor import WatchConfig
from deepspeed.engine.observers import DeviceFaults, create_device_faults
from deepspeed.plugins import FEATURES, hookimpl, plugin_manager


class Counting:
    """`Counting` is a plugin whose counts a test sets."""

    DS_PLUGIN_API = ">=1.3,<2"

    def __init__(self):
        self.counts, self.indices, self.answer = {}, [], ...

    @hookimpl
    def ds_device_faults(self, index):
        self.indices.append(index)
        if isinstance(self.counts, Exception):
            raise self.counts
        return dict(self.counts) if self.answer is ... else self.answer


@pytest.fixture
def plugin():
    counting = Counting()
    plugin_manager().register(counting, "counting", FEATURES)
    plugin_manager().activate("counting", FEATURES)
    yield counting
    plugin_manager().unregister("counting", FEATURES)


def test_risen_counts_are_told_once_and_at_their_step(plugin, lines):
    plugin.counts = {"memory errors, corrected": 7, "sparks": 0}
    faults = DeviceFaults(torch.device("meta", 3), 2)
    plugin.counts = {"memory errors, corrected": 9, "sparks": 0, "fans that stand": 1}
    faults.step_ended(None)
    assert lines == []  # not its step yet
    faults.step_ended(None)
    ((level, text),) = lines
    assert level == "WARNING"
    assert text.startswith(
        f"watch.device_faults_every: since they were last read, meta:3 of {platform.node()} had 2 more memory errors, "
        "corrected (9 in all)."
    )
    assert "fans" not in text  # it may have been 1 before
    for _ in range(2):
        faults.step_ended(None)
    assert len(lines) == 1
    assert plugin.indices == [3, 3, 3]


def test_a_reading_that_fails_costs_nothing_but_itself(plugin, lines):
    plugin.counts = {"sparks": 1}
    faults = DeviceFaults(torch.device("cpu"), 1)
    plugin.counts = OSError("the driver is gone")
    faults.step_ended(None)
    faults.step_ended(None)
    ((_, text),) = lines
    assert text == "plugin 'deepspeed.plugins:counting' failed in ds_device_faults: OSError: the driver is gone"
    plugin.counts = {"sparks": 3}
    faults.step_ended(None)
    assert "the host of" in lines[1][1]
    assert "had 2 more sparks (3 in all)" in lines[1][1]


@pytest.mark.parametrize("answer", [["sparks"], {"sparks": 1.5}, 7])
def test_an_answer_that_is_no_counts_is_named_and_training_goes_on(plugin, lines, answer):
    plugin.answer = answer
    faults = DeviceFaults(torch.device("cpu"), 1)
    faults.step_ended(None)
    ((_, text),) = lines
    assert f"answered ds_device_faults by {answer!r}; a mapping of kinds" in text


def test_a_plugin_that_answers_nothing_counts_nothing(plugin, lines):
    plugin.answer = None
    DeviceFaults(torch.device("cpu"), 1).step_ended(None)
    assert lines == []


def test_one_rank_watches_a_host_for_all(plugin, monkeypatch):
    config = WatchConfig(device_faults_every=1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert create_device_faults(config, torch.device("cpu")) is None
    assert create_device_faults(config, torch.device("meta", 1)) is not None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert create_device_faults(config, torch.device("cpu")) is not None


def test_an_engine_reads_between_its_steps(plugin, single_rank, lines):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "watch": {"device_faults_every": 1},
    }
    plugin.counts = {"sparks": 0}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
    for sparks in (0, 5, 5):
        plugin.counts = {"sparks": sparks}
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    found = [text for _, text in lines if "sparks" in text]
    engine.destroy()
    assert len(found) == 1
    assert "had 5 more sparks" in found[0]
