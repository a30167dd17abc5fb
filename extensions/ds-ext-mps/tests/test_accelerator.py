"""MPS_Accelerator answers every documented method, over the real `torch.mps` on a device of dictionaries."""

import contextlib
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.errors import ConfigError, PluginError
from deepspeed.testing import requirements, suite
from deepspeed.testing.suite.expected_failures import FILE_NAME, read_expected_failures
from ds_ext_mps.accelerator import MPS_Accelerator
from ds_ext_mps.queue import MPSEvent, MPSQueue


@pytest.fixture
def mps(metal, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return MPS_Accelerator()


def is_context(value):
    return isinstance(value, contextlib.AbstractContextManager)


def makes(dtype):
    return lambda make: make.func is torch.tensor and make.keywords == {"dtype": dtype, "device": "mps"}


# name -> (arguments, what a sane answer is); properties have None for arguments
SANE = {
    "is_synchronized_device": ((), lambda v: v is False),
    "use_host_timers": ((), lambda v: v is False),
    "resolves_data_dependency": ((), lambda v: v is True),
    "handles_memory_backpressure": ((), lambda v: v is False),
    "device_name": ((0,), lambda v: v == "mps:0"),
    "device": ((0,), is_context),
    "set_device": ((0,), lambda v: v is None),
    "current_device": ((), lambda v: v == 0),
    "current_device_name": ((), lambda v: v == "mps:0"),
    "device_count": ((), lambda v: v == 1),
    "synchronize": ((0,), lambda v: v is None),
    "is_available": ((), lambda v: v is True),
    "communication_backend_name": ((), lambda v: v == "gloo"),
    "communication_backend_version": ((), lambda v: v is None),
    "range_push": (("range",), lambda v: v is None),
    "range_pop": ((), lambda v: v is None),
    "lazy_call": ((lambda: None,), lambda v: v is None),
    "random": ((), lambda v: v is torch.random),
    "get_rng_state": ((0,), lambda v: v.dtype is torch.uint8),
    "set_rng_state": ((torch.Generator().get_state(), 0), lambda v: v is None),
    "manual_seed": ((3,), lambda v: v is None),
    "manual_seed_all": ((4,), lambda v: v is None),
    "initial_seed": ((), lambda v: isinstance(v, int)),
    "default_generator": ((0,), lambda v: isinstance(v, torch.Generator)),
    "Stream": (None, lambda v: v is MPSQueue),
    "stream": ((None,), is_context),
    "current_stream": ((), lambda v: isinstance(v, MPSQueue)),
    "default_stream": ((0,), lambda v: isinstance(v, MPSQueue)),
    "Event": (None, lambda v: v is MPSEvent),
    "create_graph": ((), lambda v: v is None),
    "capture_to_graph": ((None,), is_context),
    "empty_cache": ((), lambda v: v is None),
    "return_freed_memory": ((), lambda v: v is None),
    "memory_allocated": ((0,), lambda v: v == 10),
    "max_memory_allocated": ((), lambda v: v == 10),
    "reset_max_memory_allocated": ((), lambda v: v is None),
    "memory_cached": ((), lambda v: v == 30),
    "max_memory_cached": ((), lambda v: v == 30),
    "reset_max_memory_cached": ((), lambda v: v is None),
    "memory_stats": ((0,), lambda v: sorted(v.values()) == [10, 10, 30, 30]),
    "reset_peak_memory_stats": ((), lambda v: v is None),
    "memory_reserved": ((), lambda v: v == 30),
    "max_memory_reserved": ((), lambda v: v == 30),
    "total_memory": ((), lambda v: v == 100),
    "available_memory": ((), lambda v: v == 90),
    "pin_memory": ((torch.ones(3),), lambda v: torch.equal(v, torch.ones(3))),
    "is_pinned": ((torch.ones(3),), lambda v: v is True),
    "on_accelerator": ((torch.ones(3),), lambda v: v is False),
    "supported_dtypes": ((), lambda v: set(v) == {torch.float32, torch.bfloat16, torch.float16}),
    "is_bf16_supported": ((), lambda v: v is True),
    "is_fp16_supported": ((), lambda v: v is True),
    "is_fp64_supported": ((), lambda v: v is False),
    "prefer_triton_grouped_mm": ((), lambda v: v is False),
    "is_current_stream_capturing": ((), lambda v: v is False),
    "pin_memory_alignment": ((), lambda v: v == 1),
    "register_host_memory": ((4096, 4096), lambda v: v is False),
    "unregister_host_memory": ((4096,), lambda v: v is False),
    "pin_empty": ((2, 3), lambda v: v.shape == (2, 3)),
    "pin_empty_like": ((torch.ones(3),), lambda v: v.shape == (3,)),
    "unpin_memory": ((torch.ones(3),), lambda v: v is None),
    "is_triton_supported": ((), lambda v: v is False),
    "amp": ((), lambda v: v is None),
    "BFloat16Tensor": (None, makes(torch.bfloat16)),
    "ByteTensor": (None, makes(torch.uint8)),
    "DoubleTensor": (None, makes(torch.float64)),
    "FloatTensor": (None, makes(torch.float32)),
    "HalfTensor": (None, makes(torch.float16)),
    "IntTensor": (None, makes(torch.int32)),
    "LongTensor": (None, makes(torch.int64)),
    "op_builder_dir": ((), lambda v: v == "deepspeed.ops.op_builder"),
    "create_op_builder": (("FusedAdamBuilder",), lambda v: v is None),
    "get_op_builder": (("FusedAdamBuilder",), lambda v: v is None),
    "build_extension": ((), lambda v: isinstance(v, type)),
    "export_envs": ((), lambda v: v == []),
    "visible_devices_envs": ((), lambda v: v == []),
    "set_visible_devices_envs": (({}, [0]), lambda v: v is None),
    "get_compile_backend": ((), lambda v: v == "inductor"),
    "set_compile_backend": (("eager",), lambda v: v is None),
}


@pytest.mark.parametrize("name", [name for name in documented_names() if name != "replay_graph"])
def test_every_documented_method_answers_sanely(mps, monkeypatch, name):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)  # that question makes a context on a device
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    arguments, sane = SANE[name]
    member = getattr(mps, name)
    answer = member if arguments is None else member(*arguments)
    assert sane(answer), answer


def test_no_graph_is_recorded(mps):
    assert mps.create_graph() is None
    mps.replay_graph(None)  # nothing was recorded, and nothing happens


def test_a_second_rank_is_told_what_it_can_do(mps, monkeypatch):
    told = ": a Mac has mps:0 alone, and gloo .*; one rank, or DS_ACCELERATOR=cpu for several"
    with pytest.raises(ConfigError, match=f"device mps:1{told}"):
        mps.set_device(1)
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
