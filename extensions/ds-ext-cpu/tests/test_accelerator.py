"""CPU_Accelerator answers every documented method sanely."""

import contextlib

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, documented_names
from ds_ext_cpu import accelerator as accelerator_module
from ds_ext_cpu.accelerator import CPU_Accelerator


@pytest.fixture
def cpu(monkeypatch):
    for variable in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return CPU_Accelerator()


def is_figure(value):
    return isinstance(value, int) and value > 0


def is_context(value):
    return isinstance(value, contextlib.AbstractContextManager)


def is_maker(dtype):
    return lambda make: torch.equal(make([1, 0]), torch.tensor([1, 0], dtype=dtype))


# name -> (arguments, what a sane answer is); properties have None for arguments
SANE = {
    "is_synchronized_device": ((), lambda v: v is True),
    "use_host_timers": ((), lambda v: v is True),
    "resolves_data_dependency": ((), lambda v: v is True),
    "handles_memory_backpressure": ((), lambda v: v is True),
    "device_name": ((1,), lambda v: v == "cpu"),
    "device": ((0,), is_context),
    "set_device": ((0,), lambda v: v is None),
    "current_device": ((), lambda v: v == 0),
    "current_device_name": ((), lambda v: v == "cpu"),
    "device_count": ((), is_figure),
    "synchronize": ((), lambda v: v is None),
    "is_available": ((), lambda v: v is True),
    "communication_backend_name": ((), lambda v: v in ("gloo", "ccl")),
    "communication_backend_version": ((), lambda v: v is None or isinstance(v, str)),
    "range_push": (("range",), lambda v: v is None),
    "range_pop": ((), lambda v: v is None),
    "lazy_call": ((lambda: None,), lambda v: v is None),
    "random": ((), lambda v: v is torch.random),
    "get_rng_state": ((), lambda v: v.dtype is torch.uint8),
    "set_rng_state": ((torch.get_rng_state(),), lambda v: v is None),
    "manual_seed": ((3,), lambda v: torch.initial_seed() == 3),
    "manual_seed_all": ((4,), lambda v: torch.initial_seed() == 4),
    "initial_seed": ((), lambda v: v == torch.initial_seed()),
    "default_generator": ((0,), lambda v: v is torch.default_generator),
    "Stream": (None, lambda v: v().query()),
    "stream": ((None,), is_context),
    "current_stream": ((), lambda v: v.query()),
    "default_stream": ((), lambda v: v.query()),
    "Event": (None, lambda v: v(enable_timing=True).query()),
    "create_graph": ((), lambda v: v is None),
    "capture_to_graph": ((None,), is_context),
    "empty_cache": ((), lambda v: v is None),
    "return_freed_memory": ((), lambda v: v is None),
    "memory_allocated": ((), is_figure),
    "max_memory_allocated": ((), is_figure),
    "reset_max_memory_allocated": ((), lambda v: v is None),
    "memory_cached": ((), is_figure),
    "max_memory_cached": ((), is_figure),
    "reset_max_memory_cached": ((), lambda v: v is None),
    "memory_stats": ((), lambda v: all(map(is_figure, v.values())) and len(v) == 4),
    "reset_peak_memory_stats": ((), lambda v: v is None),
    "memory_reserved": ((), is_figure),
    "max_memory_reserved": ((), is_figure),
    "total_memory": ((), lambda v: v > 2**28),
    "available_memory": ((), is_figure),
    "pin_memory": ((torch.ones(3),), lambda v: torch.equal(v, torch.ones(3))),
    "is_pinned": ((torch.ones(3),), lambda v: v is True),
    "on_accelerator": ((torch.ones(3),), lambda v: v is True),
    "supported_dtypes": ((), lambda v: {torch.float32, torch.bfloat16, torch.float16} == set(v)),
    "is_bf16_supported": ((), lambda v: v is True),
    "is_fp16_supported": ((), lambda v: v is True),
    "is_fp64_supported": ((), lambda v: v is True),
    "prefer_triton_grouped_mm": ((), lambda v: v is False),
    "is_current_stream_capturing": ((), lambda v: v is False),
    "pin_memory_alignment": ((), lambda v: v == 1),
    "register_host_memory": ((4096, 4096), lambda v: v is False),
    "unregister_host_memory": ((4096,), lambda v: v is False),
    "pin_empty": ((2, 3), lambda v: v.shape == (2, 3)),
    "pin_empty_like": ((torch.ones(3),), lambda v: v.shape == (3,)),
    "unpin_memory": ((torch.ones(3),), lambda v: v is None),
    "is_triton_supported": ((), lambda v: v is False),
    "amp": ((), lambda v: v is torch.cpu.amp),
    "BFloat16Tensor": (None, is_maker(torch.bfloat16)),
    "ByteTensor": (None, is_maker(torch.uint8)),
    "DoubleTensor": (None, is_maker(torch.float64)),
    "FloatTensor": (None, is_maker(torch.float32)),
    "HalfTensor": (None, is_maker(torch.float16)),
    "IntTensor": (None, is_maker(torch.int32)),
    "LongTensor": (None, is_maker(torch.int64)),
    "op_builder_dir": ((), lambda v: v in ("ds_ext_cpu.op_builder", "deepspeed.ops.op_builder")),
    "create_op_builder": (("NoSuchBuilder",), lambda v: v is None),
    "get_op_builder": (("NoSuchBuilder",), lambda v: v is None),
    "build_extension": ((), lambda v: issubclass(v, object)),
    "export_envs": ((), lambda v: "OMP" in v),
    "visible_devices_envs": ((), lambda v: v == []),
    "set_visible_devices_envs": (({}, [0]), lambda v: v is None),
    "get_compile_backend": ((), lambda v: v == "inductor"),
    "set_compile_backend": (("eager",), lambda v: v is None),
}


@pytest.mark.parametrize("name", [name for name in documented_names() if name != "replay_graph"])
def test_every_documented_method_answers_sanely(cpu, name):
    arguments, sane = SANE[name]
    state = torch.get_rng_state()
    try:
        member = getattr(cpu, name)
        answer = member if arguments is None else member(*arguments)
        assert sane(answer), answer
    finally:
        torch.set_rng_state(state)


def test_no_graph_is_recorded(cpu):
    graph = cpu.create_graph()
    assert graph is None
    cpu.replay_graph(graph)  # nothing was recorded, and nothing happens


def test_it_is_an_accelerator_with_the_known_attributes(cpu):
    assert isinstance(cpu, DeepSpeedAccelerator)
    assert (cpu._name, cpu._communication_backend_name) == ("cpu", "gloo")


def test_device_count_is_the_launchers_word_then_the_nodes(cpu, monkeypatch):
    monkeypatch.setattr(accelerator_module, "usable_nodes", lambda: {0: [0], 1: [1], 2: [2]})
    assert cpu.device_count() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cpu.device_count() == 2


def test_the_communication_library_is_looked_up_and_not_imported(cpu, monkeypatch, tmp_path):
    assert cpu.communication_backend_name() == "gloo"
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("raise AssertionError('was imported')")
    info = tmp_path / "oneccl_bind_pt-2.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oneccl-bind-pt\nVersion: 2.8.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cpu.communication_backend_name() == "ccl"
    assert cpu.communication_backend_version() == "2.8.0"
