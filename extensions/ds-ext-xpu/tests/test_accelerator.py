"""XPU_Accelerator over a stand-in for `torch.xpu`: every documented method answers, and what differs from the base."""

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
import torch._dynamo  # these two look at torch.xpu as they are imported
import torch.utils.cpp_extension
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator, documented_names
from deepspeed.testing import requirements, suite
from deepspeed.testing.answers import check_answers
from deepspeed.testing.suite.fixtures import FILE_NAME, read_expected_failures
from ds_ext_xpu.accelerator import XPU_Accelerator

REAL = torch.xpu
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def load_fake():
    spec = importlib.util.spec_from_file_location("fake_xpu", Path(__file__).parent / "fake_xpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_xpu = load_fake()


@pytest.fixture
def fake(monkeypatch):
    module = fake_xpu.FakeXpu()
    torch.get_device_module.cache_clear()
    monkeypatch.setattr(torch, "xpu", module)
    # what needs a device's driver: pinned memory is plain memory here
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, device=None: False)
    yield module
    torch.get_device_module.cache_clear()


@pytest.fixture
def xpu(fake):
    return XPU_Accelerator()


@pytest.mark.skipif(TORCH < (2, 13), reason="the stand-in has what torch 2.13 has")
def test_the_stand_in_has_the_names_and_arguments_of_torch():
    own = vars(fake_xpu.FakeXpu)
    names = [name for name in own if callable(own[name]) and not name.startswith("__") and name != "_index"]
    assert len(names) > 20
    for name in names:
        parameters = [one for one in inspect.signature(getattr(fake_xpu.FakeXpu, name)).parameters if one != "self"]
        real = getattr(REAL, name)
        assert parameters == list(inspect.signature(real).parameters)[: len(parameters)], name
    for name in ("default_generators", "Stream", "Event", "XPUGraph"):
        assert hasattr(REAL, name), name


@pytest.mark.parametrize("name", documented_names())
def test_every_documented_method_answers(xpu, name):
    check_answers(xpu, name)


def test_the_devices_are_torchs(xpu, fake):
    assert (xpu.device_name(), xpu.device_name(1), xpu.current_device_name()) == ("xpu", "xpu:1", "xpu:0")
    assert xpu.device_count() == 2
    xpu.set_device(1)
    assert (xpu.current_device(), xpu.current_device_name()) == (1, "xpu:1")
    with xpu.device(0):
        assert xpu.current_device() == 0
    xpu.synchronize(0)
    assert fake.calls == [("synchronize", 0)]


def test_memory_is_in_bytes_and_of_the_device_that_is_named(xpu):
    assert [xpu.memory_allocated(), xpu.memory_allocated(1), xpu.max_memory_reserved(1)] == [100, 101, 401]
    assert (xpu.total_memory(), xpu.available_memory()) == (fake_xpu.TOTAL, fake_xpu.FREE)


def test_the_default_stream_is_the_current_one(xpu, fake):
    assert xpu.default_stream() is fake.streams[0]
    assert xpu.default_stream(1) is fake.streams[1]


def test_what_the_suite_asks_of_streams_fails_as_listed(xpu, fake, monkeypatch):
    expected = read_expected_failures(Path(__file__).with_name(FILE_NAME))
    assert set(expected) <= set(suite.__all__)
    assert list(expected) == ["test_the_default_stream_stays_while_another_is_current"]
    monkeypatch.setattr(requirements, "get_accelerator", lambda: xpu)
    suite.test_a_stream_is_current_inside_its_context(xpu)
    with pytest.raises(AssertionError):
        suite.test_the_default_stream_stays_while_another_is_current(xpu)
    assert fake.current_stream() is fake.streams[0]


def test_a_generator_opens_the_device_and_is_its_own(xpu, fake):
    assert not fake.opened
    assert xpu.default_generator(1) is fake.generators[1]
    xpu.manual_seed(41)
    state = xpu.get_rng_state()
    xpu.manual_seed_all(42)
    assert xpu.initial_seed() == 42
    xpu.set_rng_state(state, 1)
    assert torch.equal(xpu.get_rng_state(1), state)


def test_building_one_opens_no_device(fake):
    XPU_Accelerator()
    assert (fake.opened, fake.calls) == (False, [])


def test_a_graph_is_captured_and_replayed(xpu):
    graph = xpu.create_graph()
    with xpu.capture_to_graph(graph):
        pass
    xpu.replay_graph(graph)
    assert graph.replays == 1


def test_it_waits_for_nothing_by_itself(xpu):
    assert not xpu.is_synchronized_device()
    assert not xpu.resolves_data_dependency()
    assert xpu.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("xccl", "bindings", "name", "version"),
    [
        (True, True, "xccl", None),
        (True, False, "xccl", None),
        (False, True, "ccl", "2.9"),
        (False, False, "xccl", None),  # torch's own error then says what it lacks
        (None, True, "ccl", "2.9"),  # a torch that does not know xccl
    ],
)
def test_the_communication_library(xpu, monkeypatch, xccl, bindings, name, version):
    if xccl is None:
        monkeypatch.delattr(torch.distributed, "is_xccl_available", raising=False)
    else:
        monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: xccl, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: object() if bindings else None)
    monkeypatch.setattr("importlib.metadata.version", lambda distribution: "2.9")
    assert (xpu.communication_backend_name(), xpu.communication_backend_version()) == (name, version)


def test_the_launcher_limits_ranks_by_the_affinity_mask(xpu):
    environment = {}
    xpu.set_visible_devices_envs(environment, [1, 3])
    assert environment == {"ZE_AFFINITY_MASK": "1,3"}
    carried = xpu.export_envs()
    assert "CCL" in carried
    assert not any("ZE_AFFINITY_MASK".startswith(prefix) for prefix in carried)  # another host has other devices


def test_constructors_make_tensors_of_the_device(xpu):
    assert xpu.HalfTensor.keywords == {"dtype": torch.float16, "device": "xpu"}
    assert not xpu.on_accelerator(torch.ones(1))


def test_the_builders_are_found_beside_the_class(xpu):
    assert xpu.op_builder_dir() == "ds_ext_xpu.op_builder"
    assert xpu.create_op_builder("FusedAdamBuilder").name == "fused_adam"
    assert xpu.create_op_builder("CPUAdamBuilder") is None


def test_it_says_only_what_differs():
    """Everything else is the base's: a line here that repeats it would be one to maintain."""
    own = [name for name in vars(XPU_Accelerator) if not name.startswith("_")]
    assert set(own) <= set(documented_names())
    assert len(own) <= 8
    assert issubclass(XPU_Accelerator, DeepSpeedAccelerator)
