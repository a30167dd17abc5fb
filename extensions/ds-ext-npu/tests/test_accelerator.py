"""NPU_Accelerator answers every documented method on the stand-in, by calls that the vendor's signatures allow."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import documented_names
from deepspeed.testing.answers import check_answers

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


def is_made_there(dtype):
    return lambda make: make([1, 0]).dtype is dtype and make([1, 0]).device.type == "npu"


# torch's objects are made on the rank
ANSWERS = {
    "is_synchronized_device": False,
    "use_host_timers": False,
    "resolves_data_dependency": False,
    "handles_memory_backpressure": False,
    "device_name": lambda found: found in ("npu", "npu:0"),
    "current_device": 0,
    "current_device_name": "npu:0",
    "device_count": 2,
    "is_available": True,
    "communication_backend_name": "hccl",
    "communication_backend_version": "8.5.0 of HCCL",
    "default_generator": lambda found: found.device == torch.device("npu:0"),
    "Stream": lambda found: found().query(),
    "current_stream": lambda found: found.query(),
    "default_stream": lambda found: found.query(),
    "Event": lambda found: found(enable_timing=True).query(),
    "create_graph": None,
    "memory_stats": lambda found: found["allocated_bytes.all.current"] >= 0,
    "total_memory": lambda found: found > 2**20,
    "available_memory": lambda found: found > 2**20,
    "pin_memory": lambda found: found.is_pinned() and torch.equal(found, torch.ones(3)),
    "is_pinned": False,
    "on_accelerator": False,
    "supported_dtypes": lambda found: set(found) == {torch.float32, torch.bfloat16, torch.float16},
    "is_fp64_supported": True,
    "prefer_triton_grouped_mm": False,
    "is_current_stream_capturing": False,
    "pin_memory_alignment": 1,
    "register_host_memory": False,
    "unregister_host_memory": False,
    "is_triton_supported": False,
    "amp": None,
    "BFloat16Tensor": is_made_there(torch.bfloat16),
    "ByteTensor": is_made_there(torch.uint8),
    "DoubleTensor": is_made_there(torch.float64),
    "FloatTensor": is_made_there(torch.float32),
    "HalfTensor": is_made_there(torch.float16),
    "IntTensor": is_made_there(torch.int32),
    "LongTensor": is_made_there(torch.int64),
    "op_builder_dir": "ds_ext_npu.op_builder",
    "create_op_builder": lambda found: found.is_compatible(),
    "export_envs": lambda found: {"ASCEND", "HCCL"} < set(found),
    "visible_devices_envs": ["ASCEND_RT_VISIBLE_DEVICES"],
    "get_compile_backend": "inductor",
}


def insane_answers():
    """Name -> what is wrong with its answer, or the error."""
    found = {}
    accelerator = checked_accelerator()
    for name in documented_names():
        try:
            check_answers(accelerator, name, ANSWERS)
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
