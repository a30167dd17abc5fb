"""CUDA_Accelerator answers every documented method, by a stand-in for `torch.cuda` that needs no GPU."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, documented_names
from deepspeed.errors import StateError
from deepspeed.testing.answers import check_answers
from ds_ext_cuda import accelerator as accelerator_module
from ds_ext_cuda.accelerator import CUDA_Accelerator


class Graph:
    """A stand-in for `torch.cuda.CUDAGraph`."""

    replays = 0

    def replay(self):
        self.replays += 1


class Pinned(torch.Tensor):
    """A tensor that `pin_memory` of the stand-in has made."""


class StandIn:
    """A stand-in for `torch.cuda`: one card in use, with every function that the accelerator asks for."""

    Stream, Event, CUDAGraph, amp = object, object, Graph, "amp"
    default_generators = ()
    capability = (9, 0)
    initialized = True
    ranges: list[str]

    def __init__(self):
        self.calls, self.ranges = [], []
        self.nvtx = SimpleNamespace(range_push=self.ranges.append, range_pop=lambda: self.ranges and self.ranges.pop())
        self.nccl = SimpleNamespace(version=lambda: (2, 27, 3))

    def init(self):
        self.initialized, self.default_generators = True, (torch.default_generator,) * 3

    def is_initialized(self):
        return self.initialized

    def get_device_capability(self):
        return self.capability

    def device_count(self):
        return 3

    def current_device(self):
        return 1

    def get_device_properties(self, index):
        return SimpleNamespace(total_memory=80 * 2**30)

    def mem_get_info(self, index):
        return 5, 80

    def get_rng_state(self, index=None):
        return torch.zeros(16, dtype=torch.uint8)

    def device(self, index):
        return contextlib.nullcontext(index)

    stream = device

    def graph(self, graph, pool=None, stream=None):
        return contextlib.nullcontext(graph)

    def memory_stats(self, index):
        return {"allocated_bytes.all.current": 7}

    def __getattr__(self, name):
        if name in ("is_bf16_supported", "is_fp16_supported") or name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, *args)) or 7


@pytest.fixture
def card(monkeypatch):
    torch.compiler.list_backends()  # imports what must see the real module
    made = StandIn()
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"cuda": made}[name])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return made


@pytest.fixture
def cuda():
    return CUDA_Accelerator()


ANSWERS = {
    "is_synchronized_device": False,
    "use_host_timers": False,
    "resolves_data_dependency": False,
    "handles_memory_backpressure": False,
    "device_name": lambda found: found in ("cuda", "cuda:1"),
    "current_device": 1,
    "current_device_name": "cuda:1",
    "device_count": 3,
    "is_available": True,
    "communication_backend_name": "nccl",
    "communication_backend_version": (2, 27, 3),
    "initial_seed": 7,
    "default_generator": lambda found: found is torch.default_generator,
    "Stream": StandIn.Stream,
    "current_stream": 7,
    "default_stream": 7,
    "Event": StandIn.Event,
    "create_graph": lambda found: isinstance(found, Graph),
    "memory_allocated": 7,
    "max_memory_allocated": 7,
    "memory_cached": 7,
    "max_memory_cached": 7,
    "memory_stats": {"allocated_bytes.all.current": 7},
    "memory_reserved": 7,
    "max_memory_reserved": 7,
    "total_memory": 80 * 2**30,
    "available_memory": 5,
    "pin_memory": lambda found: isinstance(found, Pinned),
    "is_pinned": False,
    "on_accelerator": False,
    "supported_dtypes": lambda found: {torch.float32, torch.bfloat16, torch.float16} == set(found),
    "is_fp64_supported": True,
    "prefer_triton_grouped_mm": False,
    "is_current_stream_capturing": True,
    "pin_memory_alignment": 1,
    "register_host_memory": False,
    "unregister_host_memory": False,
    "pin_empty": lambda found: isinstance(found, Pinned),
    "pin_empty_like": lambda found: isinstance(found, Pinned),
    "is_triton_supported": True,
    "amp": "amp",
    "op_builder_dir": "ds_ext_cuda.op_builder",
    "create_op_builder": lambda found: found.name == "fused_adam",
    "get_op_builder": lambda found: found.NAME == "fused_adam",
    "build_extension": lambda found: found.__name__ == "BuildExtension",
    "export_envs": lambda found: "NCCL" in found,
    "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
    "get_compile_backend": "inductor",
}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("name", documented_names())
def test_every_documented_method_answers_sanely(cuda, name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(Pinned))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    check_answers(cuda, name, ANSWERS)


def test_calls_reach_torch_with_their_arguments(cuda, card):
    cuda.set_device(2)
    cuda.set_device(-1)  # without a call, as torch ignores it
    cuda.synchronize(1)
    cuda.memory_allocated(1)
    cuda.manual_seed_all(5)
    assert card.calls == [("set_device", 2), ("synchronize", 1), ("memory_allocated", 1), ("manual_seed_all", 5)]


def test_ranges_are_those_of_the_profiler_of_the_card(cuda, card):
    cuda.range_push("outer")
    cuda.range_push("inner")
    cuda.range_pop()
    assert card.ranges == ["outer"]
    cuda.range_pop()
    cuda.range_pop()  # none is open


@pytest.mark.usefixtures("card")
def test_a_graph_is_recorded_and_replayed(cuda):
    graph = cuda.create_graph()
    with cuda.capture_to_graph(graph) as recorded:
        assert recorded is graph
    cuda.replay_graph(graph)
    assert graph.replays == 1
    with pytest.raises(StateError, match="replay_graph got None"):
        cuda.replay_graph(None)


@pytest.mark.parametrize(
    ("capability", "fp16", "bf16", "triton"),
    [
        ((6, 1), False, False, False),
        ((7, 5), True, False, False),
        ((8, 0), True, True, True),
        ((10, 3), True, True, True),
    ],
)
def test_formats_are_those_of_the_capability(cuda, card, capability, fp16, bf16, triton):
    card.capability = capability
    assert (cuda.is_fp16_supported(), cuda.is_bf16_supported(), cuda.is_triton_supported()) == (fp16, bf16, triton)


def test_devices_are_counted_without_torch_until_it_has_opened_one(cuda, card, monkeypatch):
    card.initialized = False
    monkeypatch.setattr(accelerator_module.devices, "present", lambda: (8, "/dev/nvidia0, ..."))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert (cuda.device_count(), cuda.is_available()) == (2, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (cuda.device_count(), cuda.is_available()) == (0, False)
    assert cuda.supported_dtypes() == [torch.float32]
    assert card.calls == []
    assert not card.initialized


def test_the_generator_of_a_device_that_nobody_used_yet_is_there(cuda, card):
    card.initialized = False
    assert cuda.default_generator(0) is torch.default_generator


def test_a_rank_sees_the_devices_that_it_is_given(cuda):
    environment = {}
    cuda.set_visible_devices_envs(environment, [2, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_with_a_torch_without_cuda_it_is_there_and_says_no(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(accelerator_module.devices, "present", lambda: (8, "/dev/nvidia0, ..."))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert isinstance(cuda, DeepSpeedAccelerator)
    assert (cuda.device_count(), cuda.is_available(), cuda.communication_backend_version()) == (0, False, None)
    cuda.range_push("range")
    cuda.range_pop()
