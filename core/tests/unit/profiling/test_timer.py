"""Timers by phase, with a clock that the test turns."""

import contextlib

import pytest
from deepspeed.profiling import timer
from deepspeed.profiling.timer import PhaseTimers


class Clock:
    def __init__(self):
        self.now_s, self.synchronized_at = 0.0, []

    def perf_counter(self):
        return self.now_s

    def synchronize(self):
        self.synchronized_at.append(self.now_s)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    monkeypatch.setattr(timer, "get_accelerator", lambda: clock)
    return clock


def spend(timers, clock, name, seconds):
    with timers.phase(name):
        clock.now_s += seconds


def test_milliseconds_per_step_by_phase(clock):
    timers = PhaseTimers(True)
    for _ in range(2):
        spend(timers, clock, "forward", 0.010)
        spend(timers, clock, "step", 0.003)
    assert timers.report(2) == "time (ms) | forward: 10.00 | step: 3.00"


def test_a_report_starts_anew(clock):
    timers = PhaseTimers(True)
    spend(timers, clock, "forward", 1.0)
    timers.report(1)
    spend(timers, clock, "forward", 0.5)
    assert timers.report(1) == "time (ms) | forward: 500.00"


def test_devices_are_synchronized_at_both_ends(clock):
    spend(PhaseTimers(True), clock, "forward", 2.0)
    assert clock.synchronized_at == [0.0, 2.0]


def test_a_phase_that_fails_is_counted_too(clock):
    timers = PhaseTimers(True)
    with contextlib.suppress(KeyError), timers.phase("backward"):
        clock.now_s += 1.0
        raise KeyError("inside")
    assert timers.report(1) == "time (ms) | backward: 1000.00"


def test_disabled_it_asks_no_device(clock):
    timers = PhaseTimers(False)
    spend(timers, clock, "forward", 1.0)
    assert clock.synchronized_at == []
    assert "forward" not in timers.report(1)
