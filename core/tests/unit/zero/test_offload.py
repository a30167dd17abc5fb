"""Parts of offload alone: who waits for what, memory that cannot be page-locked, which engines get it."""

import weakref

import pytest
import torch
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.config.intake import parse_section
from deepspeed.config.training import AioConfig
from deepspeed.config.zero import OffloadOptimizerConfig
from deepspeed.log import warn_once
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.optim import is_host_front
from deepspeed.zero.layout import Fragment
from deepspeed.zero.offload import buffers, policy
from deepspeed.zero.offload.buffers import BufferRing, CopyLane, HostMemory
from deepspeed.zero.offload.host import HostPlacement
from deepspeed.zero.offload.nvme import NvmePlacement
from deepspeed.zero.offload.policy import choose_placement
from deepspeed.zero.offload.swap_slots import SwappedUnit
from deepspeed.zero.placement import Placement
from deepspeed.zero.unit import ParamShard


class Recorder(PlainAccelerator):
    """Streams and events that write down what is asked of them."""

    def __init__(self, resolves=False):
        super().__init__()
        self.log = log = []
        self.resolves = resolves

        class Stream:
            def __init__(self, name="lane"):
                self.name = name

            def wait_stream(self, other):
                log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event):
                log.append(f"{self.name} waits for event {event.number}")

            def __enter__(self):
                log.append(f"on {self.name}")

            def __exit__(self, *exc):
                log.append(f"off {self.name}")

        class Event:
            count = 0

            def record(self, stream):
                Event.count += 1
                self.number = Event.count
                log.append(f"event {self.number} on {stream.name}")

            def synchronize(self):
                log.append(f"host waits for event {self.number}")

        self._classes, self._computation = (Stream, Event), Stream("computation")

    Stream = property(lambda self: self._classes[0])
    Event = property(lambda self: self._classes[1])

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return self.resolves

    def current_stream(self, device_index=None):
        return self._computation

    def stream(self, stream):
        return stream

    def told(self):
        lines, self.log[:] = list(self.log), []
        return lines


def make_units(*starts, dtype=torch.bfloat16, numel=2):
    weights = torch.zeros(20, dtype=dtype)
    masters = torch.zeros(20)
    pieces = [(Fragment(i, 0, start, start + numel, 0), slice(start, start + numel)) for i, start in enumerate(starts)]
    return weights, [
        ParamShard(fragment.param, 0, fragment, weights[cut], masters[cut], None) for fragment, cut in pieces
    ]


def test_the_lane_follows_the_computation_and_the_computation_the_mark():
    accelerator = Recorder()
    lane = CopyLane(accelerator)
    with lane.copying():
        accelerator.log.append("copy")
    mark = lane.mark()
    mark.wait()
    mark.wait_on_host()
    assert accelerator.told() == [
        "lane waits for computation",
        "on lane",
        "copy",
        "off lane",
        "event 1 on lane",
        "computation waits for event 1",
        "host waits for event 1",
    ]


def test_where_the_device_orders_its_work_only_the_host_waits():
    accelerator = Recorder(resolves=True)
    lane = CopyLane(accelerator)
    with lane.copying():
        pass
    mark = lane.mark()
    mark.wait()
    mark.wait_on_host()
    assert accelerator.told() == ["on lane", "off lane", "event 1 on lane", "host waits for event 1"]


def test_a_synchronized_device_needs_neither_streams_nor_events():
    class Bare(PlainAccelerator):
        """As accelerators of an earlier year have it."""

        Stream = Event = None

    lane = CopyLane(Bare())
    with lane.copying():
        pass
    lane.mark().wait()
    lane.mark().wait_on_host()


def test_a_staging_buffer_is_taken_again_when_its_copy_is_done():
    accelerator = Recorder()
    lane, ring = CopyLane(accelerator), BufferRing(HostMemory(accelerator, pins=False), 2)
    first = ring.take(3, torch.float32)
    ring.hold(ring.place, lane.mark())
    second = ring.take(5, torch.bfloat16)
    assert accelerator.told() == ["event 1 on lane"]
    third = ring.take(2, torch.float32)
    assert accelerator.told() == ["host waits for event 1"]
    assert (first.dtype, second.dtype, second.numel()) == (torch.float32, torch.bfloat16, 5)
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert ring.held_bytes == 12 + 10
    ring.release()
    assert ring.held_bytes == 0


def test_weights_are_sent_while_the_host_goes_on_and_waited_for_before_the_buffers_come_round():
    accelerator = Recorder()
    placement = HostPlacement(accelerator, pins=False)
    weights, shards = make_units(0, 2, 6)  # two of them neighbours
    seen = []
    for value in (1.0, 2.0, 3.0):
        copies = placement.copies(shards)
        seen.append(copies[0].data_ptr())
        for copy in copies:
            copy.fill_(value)
        placement.send(shards, copies)
        assert weights.tolist() == [*[value] * 4, 0, 0, value, value, *[0] * 12]
    assert seen[0] == seen[2] != seen[1]
    placement.finish_sending()
    lines = [line for line in accelerator.told() if "waits for event" in line]
    assert lines == [
        "computation waits for event 1",
        "computation waits for event 2",
        "host waits for event 1",  # its buffer is the third one's
        "computation waits for event 3",
        "host waits for event 3",
    ]


def test_masters_of_the_models_dtype_are_sent_as_they_are():
    placement = HostPlacement(Recorder(), pins=False)
    weights, shards = make_units(0, 2, dtype=torch.float32)
    shards[1].master.fill_(5.0)
    assert placement.copies(shards) == []
    placement.send(shards, [])
    assert weights[:4].tolist() == [0, 0, 5, 5]
    assert placement.held_bytes == 0


class Pinning(PlainAccelerator):
    def __init__(self, error=None):
        super().__init__()
        self.pinned, self.error = [], error

    def pin_memory(self, tensor, align_bytes=1):
        if self.error is not None:
            raise self.error
        self.pinned.append(tensor.numel())
        return tensor


def test_what_crosses_is_page_locked_on_request():
    accelerator = Pinning()
    memory = HostMemory(accelerator, pins=True)
    memory.allocate(3, torch.float32)
    memory.allocate(4, torch.float32, crosses=False)
    memory.allocate(0, torch.float32)
    HostMemory(accelerator, pins=False).allocate(5, torch.float32)
    assert accelerator.pinned == [3]


def test_without_page_locked_memory_it_goes_on_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(buffers, "warn_once", said.append)
    memory = HostMemory(Pinning(RuntimeError("no more locked memory\ntrace")), pins=True)
    for _ in range(2):
        assert memory.allocate(3, torch.float32).numel() == 3
    (line,) = said
    assert "offload_optimizer.pin_memory" in line
    assert "(no more locked memory)" in line
    assert "set pin_memory to false" in line


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_device_in_host_memory_is_asked_to_pin_too(make_engine, monkeypatch, stage, precision):
    """Gradients and fp32 masters of the owned shard, and nothing if the section does not ask for it."""
    accelerator = Pinning()
    monkeypatch.setattr(policy, "get_accelerator", lambda: accelerator)
    for pins in (False, True):
        section = {"device": "cpu", "pin_memory": pins}
        engine = make_engine(
            torch.nn.Linear(4, 2), zero_optimization={"stage": stage, "offload_optimizer": section}, **precision
        )
        dtype = engine.module.weight.dtype
        engine.backward(engine(torch.ones(1, 4, dtype=dtype)).float().sum())
        engine.step()
        assert accelerator.pinned == ([10] * (1 + len(precision)) if pins else [])


def offload(**keys):
    return parse_section(OffloadOptimizerConfig, {"device": "cpu", **keys}, "zero_optimization.offload_optimizer")


def test_the_placement_follows_section_and_device():
    host, other = torch.device("cpu"), torch.device("meta")
    for section in (None, OffloadOptimizerConfig()):
        assert not choose_placement(section, stage=2, device=other).is_offloaded
    assert type(choose_placement(offload(), stage=2, device=host)) is Placement
    assert type(choose_placement(offload(), stage=1, device=other)) is HostPlacement


@pytest.mark.parametrize("section", [{"device": "cpu"}, {"device": "nvme"}], ids=["cpu", "nvme"])
def test_at_stage_0_offload_of_the_optimizer_has_no_effect_and_says_so(make_engine, lines, section):
    """DeepSpeed-Chat's configurations have the section at each stage."""
    warn_once.cache_clear()
    kinds = []
    for offload_optimizer in (section, section, None):
        zero = {"stage": 0, "offload_optimizer": offload_optimizer}
        engine = make_engine(torch.nn.Linear(4, 2), zero_optimization=zero)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert not engine.sharding.placement.is_offloaded
        kinds.append(type(engine.basic_optimizer))
        engine.destroy()
    assert len(set(kinds)) == 1  # the device's, not the one for the host
    (line,) = [text for level, text in lines if level == "WARNING"]
    assert line.startswith("zero_optimization.offload_optimizer: has no effect at stage 0")
    assert "set stage to 1, 2 or 3" in line


def test_at_stage_0_an_optimizer_that_is_slow_on_the_host_is_taken(make_engine):
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_engine(model, optimizer=None, zero_optimization=zero, arguments={"optimizer": optimizer})


@pytest.mark.parametrize("section", [{"device": "cpu"}, {"device": "nvme"}], ids=["cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_offload_of_parameters_has_no_effect_and_says_so(make_engine, lines, stage, section):
    """As in DeepSpeed: configurations for all stages have the section at each."""
    warn_once.cache_clear()
    for _ in range(2):
        engine = make_engine(torch.nn.Linear(4, 2), zero_optimization={"stage": stage, "offload_param": section})
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine.destroy()
    (line,) = [text for level, text in lines if level == "WARNING"]
    assert line.startswith(f"zero_optimization.offload_param: has no effect at stage {stage}")
    assert "set stage to 3" in line


def test_units_are_offloaded_until_the_ratio_is_met():
    host, other = torch.device("cpu"), torch.device("meta")
    numels = [30, 10, 10, 10, 10, 30]
    for ratio, expected in ((0.5, [1, 0, 0, 0, 1, 0]), (0.2, [0, 1, 0, 0, 0, 0]), (1.0, [1] * 6)):
        split = choose_placement(offload(ratio=ratio), stage=2, device=other)
        assert [split.of_unit(numel).is_offloaded for numel in numels] == [bool(is_in) for is_in in expected]
    assert type(choose_placement(offload(ratio=0), stage=2, device=other)) is Placement
    assert type(choose_placement(offload(ratio=0.5), stage=2, device=host)) is Placement


def test_fronts_of_the_host():
    param = torch.nn.Parameter(torch.zeros(2))
    assert is_host_front(DeepSpeedCPUAdam([param]))
    assert not is_host_front(FusedAdam([param]))
    assert not is_host_front(torch.optim.AdamW([param]))


def test_a_buffer_is_given_out_again_after_an_error_of_what_used_it():
    class Failed:
        def wait_on_host(self):
            raise OSError("planted")

    ring = BufferRing(HostMemory(PlainAccelerator(), pins=False), 1)
    for forgets in (False, True):
        ring.hold(0, Failed())
        if forgets:
            ring.forget()
        else:
            with pytest.raises(OSError, match="planted"):
                ring.take(1, torch.float32)
        assert ring.take(1, torch.float32).numel() == 1


def test_a_sum_on_its_way_to_the_disk_is_held_until_it_is_copied(tmp_path):
    """The lane reads it after the bucket has dropped it, and the allocator knows of no other stream."""
    accelerator = Recorder()
    accelerator.Event.query = lambda event: False
    placement = NvmePlacement(
        accelerator, tmp_path, rank=0, aio=AioConfig(), pins=False, reads_ahead=False, writes_behind=False
    )
    placement._by_index[0] = SwappedUnit([], torch.float32)
    sum_S = torch.ones(8)
    held = weakref.ref(sum_S.untyped_storage())
    placement.keeper(adds=True)(0, placement._lane.mark(), sum_S.narrow(0, 0, 4))
    del sum_S
    assert held() is not None
    placement.settle()
    assert held() is None
    placement.release()
