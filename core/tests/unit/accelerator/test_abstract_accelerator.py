"""The base answers everything from torch's module for the device, and says what to override where it cannot."""

import contextlib
import inspect
import types

import pytest
import torch
from deepspeed.accelerator.abstract_accelerator import ANY_TIME, MIXINS, DeepSpeedAccelerator, documented_names
from deepspeed.errors import ConfigError, PluginError, StateError

# The interface as DeepSpeed documents it; a name may be added here, and none taken away.
DOCUMENTED = set(
    """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure
device_name device set_device current_device current_device_name device_count synchronize
random set_rng_state get_rng_state manual_seed manual_seed_all initial_seed default_generator
Stream stream current_stream default_stream Event
empty_cache memory_allocated max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached
reset_max_memory_cached memory_stats reset_peak_memory_stats memory_reserved max_memory_reserved total_memory
available_memory return_freed_memory amp is_available range_push range_pop lazy_call communication_backend_name
prepare_dtype communication_backend_version is_triton_supported is_bf16_supported is_fp16_supported supported_dtypes
create_graph capture_to_graph replay_graph
BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
pin_memory is_pinned on_accelerator op_builder_dir create_op_builder get_op_builder build_extension
export_envs visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend
""".split()  # noqa: SIM905 - sixty names are read more easily so
)


class Sim_Accelerator(DeepSpeedAccelerator):
    _name = "sim"
    _communication_backend_name = "simccl"


@pytest.fixture
def sim(monkeypatch):
    """A device module that notes its calls, where torch looks for the device `sim`."""
    module = types.ModuleType("torch.sim")
    module.calls = []

    def note(name, answer=None):
        def function(*args, **kwargs):
            module.calls.append((name, args, kwargs))
            return answer

        setattr(module, name, function)

    for name, answer in {
        "is_available": True, "device_count": 4, "current_device": 2, "set_device": None, "synchronize": None,
        "manual_seed": None, "manual_seed_all": None, "initial_seed": 9, "get_rng_state": "state",
        "set_rng_state": None,
        "memory_allocated": 10, "max_memory_allocated": 20, "memory_reserved": 30, "max_memory_reserved": 40,
        "reset_peak_memory_stats": None, "memory_stats": {"allocated_bytes.all.current": 10}, "empty_cache": None,
        "get_device_properties": types.SimpleNamespace(total_memory=100), "current_stream": "s", "default_stream": "d",
        "stream": contextlib.nullcontext("in"), "device": contextlib.nullcontext("dev"),
    }.items():  # fmt: skip
        note(name, answer)
    module.default_generators = ["g0", "g1"]
    module.Stream, module.Event, module.amp = "StreamClass", "EventClass", "amp module"
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"sim": module}[name])
    return module


def test_every_documented_name_is_there():
    assert set(documented_names()) >= DOCUMENTED


def test_every_method_says_what_it_is():
    for mixin in MIXINS.values():
        for name, member in vars(mixin).items():
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{mixin.__name__}.{name}"


ARGUMENTS = {
    "create_op_builder": ["NoSuchBuilder"],
    "get_op_builder": ["NoSuchBuilder"],
    "lazy_call": [int],
    "on_accelerator": [torch.ones(1)],
    "range_push": ["x"],
    "set_compile_backend": ["eager"],
    "set_visible_devices_envs": [{}, [0]],
}


@pytest.mark.parametrize("name", sorted(ANY_TIME))
def test_what_may_be_asked_at_any_time_leaves_the_device_alone(sim, name):
    member = getattr(Sim_Accelerator(), name)
    if not isinstance(inspect.getattr_static(Sim_Accelerator, name), property):
        member(*ARGUMENTS.get(name, []))
    assert {called for called, _, _ in sim.calls} <= {"is_available", "device_count"}


def test_nothing_is_abstract_and_nothing_needs_init():
    assert not inspect.isabstract(DeepSpeedAccelerator)
    assert "__init__" not in vars(DeepSpeedAccelerator)


def test_two_lines_are_an_accelerator(sim):
    acc = Sim_Accelerator()
    assert (acc.device_name(), acc.device_name(0), acc.current_device_name()) == ("sim", "sim:0", "sim:2")
    assert (acc.device_count(), acc.current_device(), acc.is_available()) == (4, 2, True)
    assert acc.communication_backend_name() == "simccl"
    assert acc.communication_backend_version() is None
    assert (acc.Stream, acc.Event, acc.current_stream(), acc.default_stream(1)) == (
        "StreamClass", "EventClass", "s", "d",
    )  # fmt: skip
    assert acc.default_generator(1) == "g1"
    assert acc.amp() == "amp module"
    with acc.stream("mine") as entered, acc.device(1) as device:
        assert (entered, device) == ("in", "dev")
    with acc.stream(None):
        pass
    assert [call for call in sim.calls if call[0] == "stream"] == [("stream", ("mine",), {})]


def test_behaviour_in_time_follows_from_one_answer(sim):
    acc = Sim_Accelerator()
    asked = ("use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")
    assert not any(getattr(acc, name)() for name in asked)
    acc.is_synchronized_device = lambda: True
    assert all(getattr(acc, name)() for name in asked)


def test_memory_figures_and_old_names(sim):
    acc = Sim_Accelerator()
    assert (acc.memory_allocated(), acc.max_memory_allocated(), acc.memory_reserved(), acc.max_memory_reserved()) == (
        10, 20, 30, 40,
    )  # fmt: skip
    assert (acc.memory_cached(), acc.max_memory_cached(3)) == (30, 40)
    assert sim.calls[-1] == ("max_memory_reserved", (3,), {})
    assert (acc.total_memory(), acc.available_memory()) == (100, 90)
    sim.mem_get_info = lambda index: (55, 100)
    assert acc.available_memory() == 55
    acc.reset_max_memory_allocated(1)
    acc.reset_max_memory_cached()
    assert [call[:2] for call in sim.calls[-2:]] == [
        ("reset_peak_memory_stats", (1,)),
        ("reset_peak_memory_stats", (None,)),
    ]


def test_index_is_passed_only_when_given(sim):
    acc = Sim_Accelerator()
    acc.synchronize()
    acc.synchronize(3)
    acc.get_rng_state()
    acc.get_rng_state(3)
    acc.set_rng_state("s", 3)
    assert [call[:2] for call in sim.calls] == [
        ("synchronize", ()), ("synchronize", (3,)), ("get_rng_state", ()), ("get_rng_state", (3,)),
        ("set_rng_state", ("s", 3)),
    ]  # fmt: skip


def test_dtypes_follow_torch(sim):
    acc = Sim_Accelerator()
    assert acc.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    sim.is_bf16_supported = lambda: False
    assert acc.supported_dtypes() == [torch.float32, torch.float16]
    assert acc.is_triton_supported() is False


def test_missing_answer_names_class_and_function(sim):
    del sim.empty_cache
    with pytest.raises(NotImplementedError, match=r"Sim_Accelerator: neither torch.sim nor .* has 'empty_cache'"):
        Sim_Accelerator().empty_cache()


def test_what_torchs_module_lacks_torch_accelerator_answers(sim, monkeypatch):
    for name in ("current_device", "set_device", "device", "synchronize", "memory_allocated", "Stream", "stream"):
        delattr(sim, name)
    told = []
    generic = types.SimpleNamespace(
        current_accelerator=lambda: torch.device("meta"),
        current_device_index=lambda: 5,
        set_device_index=lambda index: told.append(("set", index)),
        device_index=contextlib.nullcontext,
        synchronize=lambda *index: told.append(("synchronize", *index)),
        memory_allocated=lambda index: 77,
        get_memory_info=lambda index: (33, 100),
    )
    monkeypatch.setattr(torch, "accelerator", generic)
    acc = Sim_Accelerator()
    with pytest.raises(NotImplementedError, match="'current_device'"):
        acc.current_device()  # it speaks of another device
    generic.current_accelerator = lambda: types.SimpleNamespace(type="sim")
    acc.set_device(1)
    acc.synchronize()
    assert told == [("set", 1), ("synchronize",)]
    assert (acc.current_device_name(), acc.memory_allocated(), acc.available_memory()) == ("sim:5", 77, 33)
    assert (acc.device_count(), acc.max_memory_allocated()) == (4, 20)  # its own module first
    assert acc.Stream is torch.Stream
    with acc.device(2) as index, acc.stream(contextlib.nullcontext("in a stream")) as stream:
        assert (index, stream) == (2, "in a stream")


def test_lazy_call_is_handed_on_or_made_now(sim):
    ran = []
    Sim_Accelerator().lazy_call(lambda: ran.append("now"))
    assert ran == ["now"]
    sim._lazy_call = ran.append
    Sim_Accelerator().lazy_call("later")
    assert ran == ["now", "later"]


def test_graphs_are_recorded_where_torch_can(sim):
    replayed = []

    class SIMGraph:
        def replay(self):
            replayed.append(self)

    acc = Sim_Accelerator()
    assert acc.create_graph() is None
    with acc.capture_to_graph(None):
        pass
    acc.replay_graph(None)
    sim.SIMGraph = SIMGraph
    sim.graph = lambda graph, pool, stream: contextlib.nullcontext((graph, pool, stream))
    graph = acc.create_graph()
    with acc.capture_to_graph(graph, pool=1, stream=2) as captured:
        assert captured == (graph, 1, 2)
    acc.replay_graph(graph)
    assert replayed == [graph]
    with pytest.raises(StateError, match="pass the graph that create_graph"):
        acc.replay_graph(None)


def test_a_device_that_torch_does_not_know():
    with pytest.raises(PluginError, match=r"no module torch.sim; import the vendor's package"):
        Sim_Accelerator().device_count()


def test_missing_names_are_told():
    class Nameless(DeepSpeedAccelerator):
        pass

    with pytest.raises(PluginError, match="Nameless has no `_name`"):
        Nameless().device_count()
    with pytest.raises(PluginError, match="no `_communication_backend_name`"):
        Nameless().communication_backend_name()


def test_ranges_nest_show_in_the_profiler_and_may_be_unbalanced():
    acc = Sim_Accelerator()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        acc.range_push("outer")
        acc.range_push("inner")
        torch.ones(1)
        acc.range_pop()
        acc.range_pop()
        acc.range_pop()
    assert {"outer", "inner"} <= {event.key for event in profile.key_averages()}


def test_visible_devices_go_into_every_variable():
    class Two(Sim_Accelerator):
        def visible_devices_envs(self):
            return ["SIM_VISIBLE", "SIM_MASK"]

    environment = {"PATH": "/bin"}
    Two().set_visible_devices_envs(environment, [0, 3])
    assert environment == {"PATH": "/bin", "SIM_VISIBLE": "0,3", "SIM_MASK": "0,3"}
    untouched = {}
    Sim_Accelerator().set_visible_devices_envs(untouched, [0])
    assert untouched == {}


def test_compile_backend_is_checked():
    acc = Sim_Accelerator()
    assert acc.get_compile_backend() == "inductor"
    acc.set_compile_backend("eager")
    assert acc.get_compile_backend() == "eager"
    assert Sim_Accelerator().get_compile_backend() == "inductor"
    with pytest.raises(ConfigError, match="'nosuch' is unknown to torch; it has .*eager"):
        acc.set_compile_backend("nosuch")


def test_unknown_builders_are_none():
    acc = Sim_Accelerator()
    assert acc.op_builder_dir() == "deepspeed.ops.op_builder"
    assert acc.create_op_builder("NoSuchBuilder") is None
    assert acc.get_op_builder("NoSuchBuilder") is None


def test_builders_are_found_in_the_package_beside(monkeypatch, tmp_path):
    package = tmp_path / "vendor_of_a_test"
    (package / "op_builder").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "accelerator.py").write_text(
        "from deepspeed.accelerator import DeepSpeedAccelerator\n"
        "class V_Accelerator(DeepSpeedAccelerator):\n    _name = 'sim'\n"
    )
    (package / "op_builder" / "__init__.py").write_text("class XBuilder:\n    pass\nNOT_A_CLASS = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    from vendor_of_a_test.accelerator import V_Accelerator

    acc = V_Accelerator()
    assert acc.op_builder_dir() == "vendor_of_a_test.op_builder"
    assert type(acc.create_op_builder("XBuilder")).__name__ == "XBuilder"
    assert acc.get_op_builder("XBuilder").__name__ == "XBuilder"
    assert acc.get_op_builder("NOT_A_CLASS") is None


def test_build_extension_is_torchs_command():
    from torch.utils.cpp_extension import BuildExtension

    assert Sim_Accelerator().build_extension() is BuildExtension
