"""MPS_Accelerator answers every documented method, over the real `torch.mps` on a device of dictionaries."""

from pathlib import Path

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.errors import ConfigError, PluginError
from deepspeed.testing import requirements, suite
from deepspeed.testing.answers import check_answers
from deepspeed.testing.suite.fixtures import FILE_NAME, read_expected_failures
from ds_ext_mps.accelerator import MPS_Accelerator
from ds_ext_mps.queue import MPSEvent, MPSQueue


@pytest.fixture
def mps(metal, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return MPS_Accelerator()


ANSWERS = {
    "is_synchronized_device": False,
    "use_host_timers": False,
    "resolves_data_dependency": True,
    "handles_memory_backpressure": False,
    "device_name": lambda found: found in ("mps", "mps:0"),
    "current_device": 0,
    "current_device_name": "mps:0",
    "device_count": 1,
    "is_available": True,
    "communication_backend_name": "gloo",
    "communication_backend_version": None,
    "Stream": MPSQueue,
    "current_stream": lambda found: isinstance(found, MPSQueue),
    "default_stream": lambda found: isinstance(found, MPSQueue),
    "Event": MPSEvent,
    "create_graph": None,
    "memory_allocated": 10,
    "max_memory_allocated": 10,
    "memory_cached": 30,
    "max_memory_cached": 30,
    "memory_stats": lambda found: sorted(found.values()) == [10, 10, 30, 30],
    "memory_reserved": 30,
    "max_memory_reserved": 30,
    "total_memory": 100,
    "available_memory": 90,
    "pin_memory": lambda found: torch.equal(found, torch.ones(3)),
    "is_pinned": True,
    "on_accelerator": False,
    "supported_dtypes": lambda found: set(found) == {torch.float32, torch.bfloat16, torch.float16},
    "is_fp64_supported": False,
    "prefer_triton_grouped_mm": False,
    "is_current_stream_capturing": False,
    "pin_memory_alignment": 1,
    "register_host_memory": False,
    "unregister_host_memory": False,
    "is_triton_supported": False,
    "amp": None,
    "op_builder_dir": "deepspeed.ops.op_builder",
    "create_op_builder": None,
    "get_op_builder": None,
    "export_envs": [],
    "visible_devices_envs": [],
    "get_compile_backend": "inductor",
}


@pytest.mark.parametrize("name", documented_names())
def test_every_documented_method_answers_sanely(mps, monkeypatch, name):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)  # that question makes a context on a device
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    check_answers(mps, name, ANSWERS)


def test_no_graph_is_recorded(mps):
    assert mps.create_graph() is None
    mps.replay_graph(None)  # nothing was recorded, and nothing happens


def test_a_second_rank_is_told_what_it_can_do(mps, monkeypatch):
    told = ": a Mac has mps:0 alone, and gloo .*; one rank, or DS_ACCELERATOR=cpu for several"
    with pytest.raises(ConfigError, match=f"device mps:1{told}"):
        mps.set_device(1)
    mps.set_device(-1)  # as torch ignores it
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"WORLD_SIZE=2{told}"):
        mps.communication_backend_name()


def test_without_the_device_it_is_not_built(metal):
    metal.present = False
    with pytest.raises(PluginError, match=r"finds no Metal device \(built for Metal: True\)"):
        MPS_Accelerator()


def test_every_stream_is_the_one_queue(mps, metal):
    queue = mps.Stream(priority=-1)
    queue.wait_stream(mps.current_stream())
    with mps.stream(queue):
        assert not queue.query()
        mark = queue.record_event()
        mark.wait(queue)
        assert [metal.events[number]["calls"] for number in metal.events] == [["record", "wait"]]
    mps.default_stream(0).synchronize()
    assert metal.waits == 1
    assert queue.query()


def test_the_queue_is_the_current_and_the_default_stream(mps, monkeypatch):
    assert mps.current_stream() is mps.default_stream(0) is mps.current_stream(0)
    with mps.stream(mps.Stream()):
        assert mps.current_stream() is mps.default_stream()
    monkeypatch.setattr(requirements, "get_accelerator", lambda: mps)
    suite.test_the_default_stream_is_current_at_first(mps)
    suite.test_no_stream_leaves_the_current_one(mps)
    suite.test_the_default_stream_stays_while_another_is_current(mps)


def test_what_the_suite_asks_of_streams_fails_as_listed(mps, monkeypatch):
    expected = read_expected_failures(Path(__file__).with_name(FILE_NAME))
    assert "test_a_stream_is_current_inside_its_context" in expected
    assert set(expected) <= set(suite.__all__)
    monkeypatch.setattr(requirements, "get_accelerator", lambda: mps)
    with pytest.raises(AssertionError):
        suite.test_a_stream_is_current_inside_its_context(mps)


def test_available_memory_is_not_asked_of_torchs_accelerator(mps, metal, monkeypatch):
    def internal_assert(*arguments):
        raise RuntimeError("INTERNAL ASSERT FAILED: allocator for mps is not a DeviceAllocator")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *check: torch.device("mps"))
    for name in ("get_memory_info", "memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, internal_assert, raising=False)
    assert mps.available_memory() == mps.available_memory(0) == 90
    metal.allocated = 130  # more than Metal recommends
    assert mps.available_memory() == 0


def test_events_take_a_stream_and_measure_time(mps, metal):
    start, end = mps.Event(enable_timing=True), mps.Event(enable_timing=True)
    start.record(mps.current_stream())
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == 1.0
    assert [event["timing"] for event in metal.events.values()] == [True, True]
    assert [event["calls"] for event in metal.events.values()] == [["record"], ["record", "synchronize"]]


def test_the_peak_is_the_highest_figure_that_was_asked_for(mps, metal):
    metal.allocated, metal.driver = 70, 90
    assert (mps.memory_allocated(), mps.memory_reserved()) == (70, 90)
    metal.allocated, metal.driver = 20, 40
    assert (mps.max_memory_allocated(), mps.max_memory_reserved()) == (70, 90)
    assert mps.memory_stats()["allocated_bytes.all.peak"] == 70
    mps.reset_peak_memory_stats()
    assert (mps.max_memory_allocated(), mps.max_memory_reserved()) == (20, 40)
    mps.empty_cache()
    assert mps.memory_reserved() == 20
    assert mps.available_memory() == 80


def test_a_seed_gives_the_same_numbers_again(mps, metal):
    def draw():
        return torch.rand(3, generator=metal.generator).tolist()

    mps.manual_seed_all(5)
    assert mps.initial_seed() == 5
    state = mps.get_rng_state()
    first = draw()
    mps.set_rng_state(state)
    assert draw() == first
    mps.manual_seed(6)
    assert draw() != first
