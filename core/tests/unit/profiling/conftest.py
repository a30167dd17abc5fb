"""A clock that the test turns, and a device with events on it."""

import pytest
from deepspeed.profiling import timer as timer_module


class FakeDevice:
    """A clock, and a device whose work is done when the host waits for it, `lag_s` after it was given."""

    def __init__(self):
        self.now_s = 0.0
        self.lag_s = 0.0
        self.num_waits = 0
        self.is_asynchronous = False
        self.has_events = True

    def perf_counter(self):
        return self.now_s

    # what the timers ask an accelerator

    def is_synchronized_device(self):
        return not self.is_asynchronous

    def use_host_timers(self):
        return not self.has_events

    def synchronize(self):
        self.num_waits += 1
        self.now_s += self.lag_s
        self.lag_s = 0.0

    def memory_allocated(self):
        return 3 * 2**20

    def max_memory_allocated(self):
        return 5 * 2**20

    @property
    def Event(self):
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at_s = device.now_s + device.lag_s

            def query(self):
                return self.at_s <= device.now_s

            def synchronize(self):
                device.num_waits += 1
                device.now_s = max(device.now_s, self.at_s)

            def elapsed_time(self, end):
                assert end.query(), "asked before the device was there"
                return (end.at_s - self.at_s) * 1e3

        return Event


@pytest.fixture
def device(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(timer_module, "time", device)
    for name in ("timer", "breakdown"):
        monkeypatch.setattr(f"deepspeed.profiling.{name}.get_accelerator", lambda: device)
    return device
