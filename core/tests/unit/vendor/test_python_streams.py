"""A vendor whose streams, events and process-group library are its own Python objects: engines train, and honour them.

Its memory is the host's, so that the test runs everywhere; offload is made to copy all the same.
"""

import contextlib
import os
import time

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import current, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.zero.offload.host import MAX_ARRIVING, HostPlacement


class PyStream:
    """A queue as an object that torch knows nothing of."""

    def __init__(self, name="lane"):
        self.name = name

    def wait_stream(self, other):
        told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        assert event.stream is not None, "an event was awaited that nobody recorded"
        told.append(f"{self.name} waits for an event of {event.stream.name}")


class PyEvent:
    """A mark; `elapsed_time` is milliseconds, as everywhere."""

    def __init__(self, enable_timing=False):
        self.timed, self.stream, self.at_s = enable_timing, None, None

    def record(self, stream=None):
        self.stream, self.at_s = stream or PY._current, time.perf_counter()
        told.append("a timed event" if self.timed else f"an event on {self.stream.name}")

    def synchronize(self):
        told.append("host waits")

    def query(self):
        return True

    def elapsed_time(self, end):
        assert self.timed
        return (end.at_s - self.at_s) * 1e3


class PY_Accelerator(PlainAccelerator):
    """Works behind the host, as far as the core is told."""

    _communication_backend_name = "pyccl"
    Stream, Event = PyStream, PyEvent

    def __init__(self):
        super().__init__()
        self._current, self.host_timers = PyStream("computation"), True
        self.resolves = self.holds_back = False

    def is_synchronized_device(self):
        return False

    def resolves_data_dependency(self):
        return self.resolves

    def handles_memory_backpressure(self):
        return self.holds_back

    def use_host_timers(self):
        return self.host_timers

    def current_stream(self, device_index=None):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before


told: list[str] = []
PY = PY_Accelerator()


def make_gloo(store, rank, size, timeout):
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


@pytest.fixture(scope="module", autouse=True)
def world():
    """One rank over the vendor's own library, which the accelerator names; choice and environment are put back."""
    before, choice = dict(os.environ), (current._choice, current.installed)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    current._choice = current.installed = None
    set_accelerator(PY)
    if "pyccl" not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend("pyccl", make_gloo, devices=["cpu"])
    dist.init_distributed(verbose=False)
    yield
    dist.destroy_process_group()
    current._choice, current.installed = choice
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def train(monkeypatch):
    """Losses of four steps: `train(stage, offload=..., resolves=..., **more config)`."""
    monkeypatch.setattr(HostPlacement, "is_needed", staticmethod(lambda device: True))
    told.clear()

    def run(stage, *, offload=True, resolves=False, **more):
        monkeypatch.setattr(PY, "resolves", resolves)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        zero = {"stage": stage, "reduce_bucket_size": 16}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            "zero_optimization": zero,
            **more,
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        losses = []
        for seed in range(8):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed % 2))
            loss = engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    return run


def test_its_own_library_makes_the_process_group():
    assert torch.distributed.get_backend() == "pyccl"
    assert dist.group_backend().name == "pyccl"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_it_trains_with_offload_as_it_does_without(train, stage, precision):
    expected = train(stage, offload=False, **precision)
    assert told == []
    losses = train(stage, **precision)
    assert losses == pytest.approx(expected, rel=1e-6 if not precision else 1e-2)
    assert losses[-1] < losses[1]  # of the same batch
    copies = [line for line in told if line == "lane waits for computation"]
    assert len(copies) >= 8  # a copy begins when what it copies is there
    assert told.count("an event on lane") == len(copies)  # and ends with a mark
    assert "computation waits for an event of lane" in told  # that the next forward comes after
    assert "host waits" in told


@pytest.mark.parametrize("stage", [1, 2])
def test_where_the_device_orders_uses_itself_only_the_host_waits(train, stage):
    expected = train(stage)
    assert any("waits for" in line for line in told)
    told.clear()
    assert train(stage, resolves=True) == expected
    assert set(told) == {"an event on lane", "host waits"}


@pytest.mark.parametrize("stage", [1, 2])
def test_the_host_bounds_what_is_in_flight_unless_the_device_does(train, monkeypatch, stage):
    def in_flight_before_the_first_wait():
        return told[: told.index("host waits")].count("an event on lane")

    expected = train(stage, gradient_accumulation_steps=1, train_batch_size=4)
    assert in_flight_before_the_first_wait() == MAX_ARRIVING
    told.clear()
    monkeypatch.setattr(PY, "holds_back", True)
    assert train(stage, gradient_accumulation_steps=1, train_batch_size=4) == expected
    assert in_flight_before_the_first_wait() > MAX_ARRIVING


@pytest.mark.parametrize("host_timers", [False, True])
def test_timers_are_its_events_or_the_hosts_clock(train, monkeypatch, host_timers):
    monkeypatch.setattr(PY, "host_timers", host_timers)
    train(1, offload=False)
    assert ("a timed event" in told) is not host_timers
