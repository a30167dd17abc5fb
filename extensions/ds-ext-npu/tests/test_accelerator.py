"""NPU_Accelerator answers every documented method on the stand-in, by calls that the vendor's signatures allow."""

import contextlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import documented_names

API = json.loads((Path(__file__).parent / "vendor_api.json").read_text())


def vendor_signature(name):
    """What `torch.npu.<name>` takes; KeyError for a name that nobody has read from the vendor's sources."""
    namespace = {}
    exec(f"def function{API['torch.npu'][name]}: pass", namespace)
    return inspect.signature(namespace["function"])


def checked_accelerator():
    from ds_ext_npu.accelerator import NPU_Accelerator

    class Checked(NPU_Accelerator):
        def _ask(self, name, *args, **kwargs):
            vendor_signature(name).bind(*args, **kwargs)
            return super()._ask(name, *args, **kwargs)

    return Checked()


def is_figure(value):
    return isinstance(value, int) and value >= 0


def is_context(value):
    return isinstance(value, contextlib.AbstractContextManager)


def makes(dtype):
    return lambda make: make([1, 0]).dtype is dtype and make([1, 0]).device.type == "npu"


# name -> (arguments, what a sane answer is); properties have None for arguments. Torch's objects are made on the rank.
SANE = {
    "is_synchronized_device": ((), lambda v: v is False),
    "use_host_timers": ((), lambda v: v is False),
    "resolves_data_dependency": ((), lambda v: v is False),
    "handles_memory_backpressure": ((), lambda v: v is False),
    "device_name": ((1,), lambda v: v == "npu:1"),
    "device": ((1,), is_context),
    "set_device": ((0,), lambda v: v is None),
    "current_device": ((), lambda v: v == 0),
    "current_device_name": ((), lambda v: v == "npu:0"),
    "device_count": ((), lambda v: v == 2),
    "synchronize": ((0,), lambda v: v is None),
    "is_available": ((), lambda v: v is True),
    "communication_backend_name": ((), lambda v: v == "hccl"),
    "communication_backend_version": ((), lambda v: v == "8.5.0 of HCCL"),
    "range_push": (("range",), lambda v: v is None),
    "range_pop": ((), lambda v: v is None),
    "lazy_call": ((lambda: None,), lambda v: v is None),
    "random": ((), lambda v: v is torch.random),
    "get_rng_state": ((1,), lambda v: v.dtype is torch.uint8),
    "set_rng_state": ((torch.Generator().get_state(), 1), lambda v: v is None),
    "manual_seed": ((3,), lambda v: v is None),
    "manual_seed_all": ((4,), lambda v: v is None),
    "initial_seed": ((), lambda v: isinstance(v, int)),
    "default_generator": ((1,), lambda v: v.device == torch.device("npu:1")),
    "Stream": (None, lambda v: v().query()),
    "stream": ((None,), is_context),
    "current_stream": ((0,), lambda v: v.query()),
    "default_stream": ((), lambda v: v.query()),
    "Event": (None, lambda v: v(enable_timing=True).query()),
    "create_graph": ((), lambda v: v is None),
    "capture_to_graph": ((None,), is_context),
    "empty_cache": ((), lambda v: v is None),
    "return_freed_memory": ((), lambda v: v is None),
    "memory_allocated": ((0,), is_figure),
    "max_memory_allocated": ((), is_figure),
    "reset_max_memory_allocated": ((), lambda v: v is None),
    "memory_cached": ((), is_figure),
    "max_memory_cached": ((), is_figure),
    "reset_max_memory_cached": ((), lambda v: v is None),
    "memory_stats": ((), lambda v: is_figure(v["allocated_bytes.all.current"])),
    "reset_peak_memory_stats": ((0,), lambda v: v is None),
    "memory_reserved": ((), is_figure),
    "max_memory_reserved": ((), is_figure),
    "total_memory": ((1,), lambda v: v > 2**20),
    "available_memory": ((), lambda v: v > 2**20),
    "pin_memory": ((torch.ones(3),), lambda v: v.is_pinned() and torch.equal(v, torch.ones(3))),
    "is_pinned": ((torch.ones(3),), lambda v: v is False),
    "on_accelerator": ((torch.ones(3),), lambda v: v is False),
    "supported_dtypes": ((), lambda v: set(v) == {torch.float32, torch.bfloat16, torch.float16}),
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
    "amp": ((), lambda v: v is None),
    "BFloat16Tensor": (None, makes(torch.bfloat16)),
    "ByteTensor": (None, makes(torch.uint8)),
    "DoubleTensor": (None, makes(torch.float64)),
    "FloatTensor": (None, makes(torch.float32)),
    "HalfTensor": (None, makes(torch.float16)),
    "IntTensor": (None, makes(torch.int32)),
    "LongTensor": (None, makes(torch.int64)),
    "op_builder_dir": ((), lambda v: v == "ds_ext_npu.op_builder"),
    "create_op_builder": (("FusedAdamBuilder",), lambda v: v.is_compatible()),
    "get_op_builder": (("NoSuchBuilder",), lambda v: v is None),
    "build_extension": ((), lambda v: isinstance(v, type)),
    "export_envs": ((), lambda v: {"ASCEND", "HCCL"} < set(v)),
    "visible_devices_envs": ((), lambda v: v == ["ASCEND_RT_VISIBLE_DEVICES"]),
    "set_visible_devices_envs": (({}, [0]), lambda v: v is None),
    "get_compile_backend": ((), lambda v: v == "inductor"),
    "set_compile_backend": (("eager",), lambda v: v is None),
}


def insane_answers():
    """Name -> the answer that is not sane, or the error."""
    found = {}
    accelerator = checked_accelerator()
    for name in documented_names():
        if name == "replay_graph":
            continue
        arguments, sane = SANE[name]
        try:
            member = getattr(accelerator, name)
            answer = member if arguments is None else member(*arguments)
            if not sane(answer):
                found[name] = repr(answer)
        except Exception as error:  # noqa: BLE001 - whatever an answer raises is the finding
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_every_documented_method_answers_sanely(npu):
    assert npu(insane_answers) == [{}]


def test_graphs_are_recorded_as_the_vendor_wants_it():
    """The stand-in records none; the base's call must fit the vendor's class."""
    graph = object()
    bound = vendor_signature("graph").bind(graph, pool=None, stream=None)
    assert bound.arguments["npu_graph"] is graph
    assert vendor_signature("NPUGraph").bind() is not None


def recorded():
    accelerator = checked_accelerator()
    graph = accelerator.create_graph()
    accelerator.replay_graph(graph)  # nothing was recorded, and nothing happens
    return graph


def test_no_graph_is_recorded(npu):
    assert npu(recorded)[0] is None


def seeds_and_streams():
    accelerator = checked_accelerator()
    accelerator.manual_seed(5)
    state = accelerator.get_rng_state()
    first = torch.rand(3, device="npu").tolist()
    accelerator.set_rng_state(state)
    again = torch.rand(3, device="npu").tolist()
    queue = accelerator.Stream()
    with accelerator.stream(queue):
        start, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
        start.record()
        torch.ones(1000, device="npu").add_(1)
        end.record()
    end.synchronize()
    return first == again, accelerator.initial_seed(), start.elapsed_time(end) >= 0


def test_seeds_are_kept_and_events_measure(npu):
    assert npu(seeds_and_streams) == [(True, 5, True)]


def test_visible_devices_are_written_in_the_order_that_the_vendor_takes(monkeypatch):
    from ds_ext_npu import vendor
    from ds_ext_npu.accelerator import NPU_Accelerator

    monkeypatch.setattr(vendor, "load", lambda: None)
    environment = {}
    NPU_Accelerator().set_visible_devices_envs(environment, [3, 1])
    assert environment == {"ASCEND_RT_VISIBLE_DEVICES": "1,3"}


@pytest.mark.parametrize("answer", ["", None])
def test_a_version_that_the_vendor_cannot_tell_is_none(monkeypatch, answer):
    import types

    from ds_ext_npu import vendor
    from ds_ext_npu.accelerator import NPU_Accelerator

    monkeypatch.setattr(vendor, "load", lambda: None)
    accelerator = NPU_Accelerator()
    utils = types.SimpleNamespace(get_cann_version=lambda module: answer)
    module = types.SimpleNamespace(utils=utils)
    monkeypatch.setattr(accelerator, "_module", lambda: module)
    assert accelerator.communication_backend_version() is None
    module.utils = None
    assert accelerator.communication_backend_version() is None
