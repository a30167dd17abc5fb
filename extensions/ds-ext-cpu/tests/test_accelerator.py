"""CPU_Accelerator answers every documented method sanely."""

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, documented_names
from deepspeed.testing.answers import check_answers
from ds_ext_cpu import accelerator as accelerator_module
from ds_ext_cpu.accelerator import CPU_Accelerator


@pytest.fixture
def cpu(monkeypatch):
    for variable in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return CPU_Accelerator()


ANSWERS = {
    "is_synchronized_device": True,
    "use_host_timers": True,
    "resolves_data_dependency": True,
    "handles_memory_backpressure": True,
    "device_name": "cpu",
    "current_device": 0,
    "current_device_name": "cpu",
    "device_count": lambda found: found > 0,
    "is_available": True,
    "communication_backend_name": lambda found: found in ("gloo", "ccl"),
    "communication_backend_version": lambda found: found is None or isinstance(found, str),
    "manual_seed": lambda found: torch.initial_seed() == 7,
    "manual_seed_all": lambda found: torch.initial_seed() == 7,
    "initial_seed": lambda found: found == torch.initial_seed(),
    "default_generator": lambda found: found is torch.default_generator,
    "Stream": lambda found: found().query(),
    "current_stream": lambda found: found.query(),
    "default_stream": lambda found: found.query(),
    "Event": lambda found: found(enable_timing=True).query(),
    "create_graph": None,
    "memory_allocated": lambda found: found > 0,
    "memory_stats": lambda found: len(found) == 4 and min(found.values()) > 0,
    "total_memory": lambda found: found > 2**28,
    "available_memory": lambda found: found > 0,
    "pin_memory": lambda found: torch.equal(found, torch.ones(3)),
    "is_pinned": True,
    "on_accelerator": True,
    "supported_dtypes": lambda found: {torch.float32, torch.bfloat16, torch.float16} == set(found),
    "is_fp64_supported": True,
    "prefer_triton_grouped_mm": False,
    "is_current_stream_capturing": False,
    "pin_memory_alignment": 1,
    "register_host_memory": False,
    "unregister_host_memory": False,
    "is_triton_supported": False,
    "amp": lambda found: found is torch.cpu.amp,
    "op_builder_dir": lambda found: found in ("ds_ext_cpu.op_builder", "deepspeed.ops.op_builder"),
    "export_envs": lambda found: "OMP" in found,
    "visible_devices_envs": [],
    "get_compile_backend": "inductor",
}


@pytest.mark.parametrize("name", documented_names())
def test_every_documented_method_answers_sanely(cpu, name):
    state = torch.get_rng_state()
    try:
        check_answers(cpu, name, ANSWERS)
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
