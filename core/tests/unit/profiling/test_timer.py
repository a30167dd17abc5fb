"""Timers under their documented names, with a clock that the test turns."""

import deepspeed.utils.timer as old_address
import pytest
from deepspeed.errors import StateError
from deepspeed.profiling import timer as timer_module
from deepspeed.profiling.timer import (
    EventStopwatch,
    HostStopwatch,
    NoopTimer,
    SynchronizedWallClockTimer,
    create_stopwatch,
    trim_mean,
)


def spend(timer, device, seconds):
    timer.start()
    device.now_s += seconds
    timer.stop()


def test_the_old_address_is_the_module():
    assert old_address is timer_module
    assert {"SynchronizedWallClockTimer", "ThroughputTimer", "NoopTimer"} <= set(dir(old_address))


def test_spans_add_up_until_a_reading_resets(device):
    timer = SynchronizedWallClockTimer()("data")
    spend(timer, device, 0.25)
    device.now_s += 7.0
    spend(timer, device, 0.5)
    assert timer.elapsed(reset=False) == pytest.approx(750)
    assert timer.elapsed() == pytest.approx(750)
    assert timer.elapsed() == 0.0


def test_a_running_timer_is_read_up_to_now_and_goes_on(device):
    timer = SynchronizedWallClockTimer()("data")
    timer.start()
    device.now_s += 1.0
    assert timer.elapsed() == pytest.approx(1000)
    device.now_s += 0.5
    timer.stop()
    assert timer.elapsed() == pytest.approx(500)


def test_stop_with_reset_keeps_the_last_span(device):
    timer = SynchronizedWallClockTimer()("data")
    spend(timer, device, 4.0)
    timer.start()
    device.now_s += 0.5
    timer.stop(reset=True)
    assert timer.elapsed() == pytest.approx(500)


def test_starts_and_stops_alternate(device):
    timers = SynchronizedWallClockTimer()
    with pytest.raises(StateError, match="timer 'x' is not started"):
        timers("x").stop()
    timers("x").start()
    with pytest.raises(StateError, match="timer 'x' has already been started"):
        timers("x").start()


def test_timers_are_known_by_name(device):
    timers = SynchronizedWallClockTimer()
    assert not timers.has_timer("a")
    assert timers("a") is timers("a")
    assert timers.has_timer("a")
    assert list(timers.get_timers()) == ["a"]


def test_log_prints_the_known_names_and_begins_anew(device, capsys):
    timers = SynchronizedWallClockTimer()
    spend(timers("a"), device, 0.010)
    spend(timers("b"), device, 0.005)
    timers.log(["b", "missing", "a"], normalizer=2, reset=False)
    timers.log(["a"], memory_breakdown=True)
    timers.log(["a"])
    said = [line.split("] ")[-1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "time (ms) | b: 2.50 | a: 5.00",
        "time (ms) | a: 10.00 | mem allocated: 0.0029 GiB, peak: 0.0049 GiB",
        "time (ms) | a: 0.00",
    ]


def test_log_on_other_ranks_only(device, capsys, monkeypatch):
    timers = SynchronizedWallClockTimer()
    spend(timers("a"), device, 1.0)
    timers.log(["a"], reset=False, ranks=[1])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "1")
    timers.log(["a"], ranks=[1])
    assert "a: 1000.00" in capsys.readouterr().err


def test_means_leave_out_the_extremes(device):
    timers = SynchronizedWallClockTimer()
    for seconds in [100.0] + [0.002] * 4 + [0.004] * 4 + [0.0]:
        spend(timers("a"), device, seconds)
    assert timers.get_mean(["a", "missing"], normalizer=3, reset=False) == {"a": pytest.approx(1.0)}
    assert timers("a").mean() == pytest.approx(3.0)
    timers.get_mean(["a"])
    assert timers("a").mean() == 0.0


def test_a_normalizer_divides(device):
    for call in ("log", "get_mean"):
        with pytest.raises(ValueError, match="normalizer: found 0; allowed: a number > 0"):
            getattr(SynchronizedWallClockTimer(), call)(["a"], normalizer=0)


def test_trim_mean():
    assert trim_mean([9, 1, 2, 3, 100], 0.2) == pytest.approx(14 / 3)
    assert trim_mean([4.0], 0.4) == 4.0
    assert trim_mean([], 0.1) == 0.0
    with pytest.raises(ValueError, match=r"trim_percent is 0\.5; allowed: 0 <= trim_percent < 0\.5"):
        trim_mean([1.0], 0.5)


def test_a_noop_timer_answers_everything():
    timers = NoopTimer()
    timers("a").start()
    timers("a").stop(record=True)
    timers("a").reset()
    timers.log(["a"])
    assert (timers("a").elapsed(), timers("a").mean(), timers.get_mean(["a"])) == (0.0, 0.0, {})
    assert timers.has_timer("a")
    assert timers.get_timers() == {}


# ---- what is waited for ---------------------------------------------------------------------------------------------


def test_a_host_device_is_never_waited_for(device):
    assert isinstance(create_stopwatch(), HostStopwatch)
    timer = SynchronizedWallClockTimer()("a")
    spend(timer, device, 1.0)
    timer.elapsed()
    assert device.num_waits == 0


def test_events_count_the_device_and_wait_only_when_read(device):
    device.is_asynchronous = True
    assert isinstance(create_stopwatch(), EventStopwatch)
    timer = SynchronizedWallClockTimer()("a")
    timer.start()
    device.lag_s = 2.0  # the device gets two seconds of work, the host goes on at once
    timer.stop()
    assert device.num_waits == 0
    assert timer.elapsed() == pytest.approx(2000)
    assert device.num_waits == 1


def test_events_of_finished_work_are_let_go_without_waiting(device):
    device.is_asynchronous = True
    stopwatch = EventStopwatch()
    for _ in range(3):
        stopwatch.start()
        device.now_s += 0.5
        stopwatch.stop()
    stopwatch.start()
    device.lag_s = 1.0
    stopwatch.stop()
    assert stopwatch.collect(wait=False) == [pytest.approx(500)] * 3
    assert stopwatch.collect(wait=False) == []
    assert device.num_waits == 0
    assert stopwatch.collect(wait=True) == [pytest.approx(1000)]


def test_without_events_the_host_waits_at_both_ends(device):
    device.is_asynchronous, device.has_events = True, False
    timer = SynchronizedWallClockTimer()("a")
    timer.start()
    device.lag_s = 2.0
    timer.stop()
    assert timer.elapsed() == pytest.approx(2000)
    assert device.num_waits == 2


def test_a_device_whose_events_torch_does_not_have_is_waited_for(device, monkeypatch):
    def missing(device):
        raise NotImplementedError("torch.xyz has no 'Event'")

    device.is_asynchronous = True
    monkeypatch.setattr(type(device), "Event", property(missing))
    stopwatch = create_stopwatch()
    stopwatch.start()
    device.lag_s = 2.0
    stopwatch.stop()
    assert stopwatch.collect(wait=False) == [pytest.approx(2000)]
    assert device.num_waits == 2


def test_unsynchronized_the_host_never_waits(device):
    device.is_asynchronous = True
    stopwatch = create_stopwatch(synchronized=False)
    stopwatch.start()
    device.lag_s = 2.0
    stopwatch.stop()
    assert stopwatch.collect(wait=True) == [0.0]
    assert device.num_waits == 0
