"""Phases and their tables, with a clock that the test turns."""

import contextlib

import pytest
from deepspeed.profiling.breakdown import Breakdown, Window, forward_table, step_table
from deepspeed.profiling.timer import NoopTimer


def spend(breakdown, device, phase, seconds):
    with breakdown.phase(phase):
        device.now_s += seconds


def test_times_since_the_last_reading_and_of_the_window(device):
    breakdown = Breakdown(times=True, memory=False)
    spend(breakdown, device, "forward", 1.0)
    spend(breakdown, device, "forward", 0.5)
    assert breakdown.take_times() == {"forward": pytest.approx(1500)}
    spend(breakdown, device, "forward", 2.0)
    spend(breakdown, device, "step", 0.25)
    breakdown.end_step()
    window = breakdown.take_window()
    assert (window.num_steps, window.times_ms) == (1, {"forward": pytest.approx(3500), "step": pytest.approx(250)})
    assert breakdown.take_window() == Window(times_ms={"forward": 0.0, "step": 0.0})


def test_timers_have_the_names_of_deepspeed(device):
    breakdown = Breakdown(times=True, memory=False)
    phases = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    for seconds, phase in enumerate(phases, start=1):
        spend(breakdown, device, phase, seconds)
    elapsed = {name: round(timer.elapsed()) for name, timer in breakdown.timers.get_timers().items()}
    assert elapsed == {"fwd": 1000, "bwd": 2000, "bwd_inner": 3000, "bwd_allreduce": 4000, "step": 5000}


def test_a_phase_that_fails_is_counted_too(device):
    breakdown = Breakdown(times=True, memory=False)
    with contextlib.suppress(KeyError), breakdown.phase("backward"):
        device.now_s += 1.0
        raise KeyError("inside")
    assert breakdown.take_times() == {"backward": pytest.approx(1000)}


def test_a_phase_inside_of_itself_counts_once(device):
    breakdown = Breakdown(times=True, memory=False)
    with breakdown.phase("forward"):
        spend(breakdown, device, "forward", 1.0)
        device.now_s += 1.0
    assert breakdown.take_times() == {"forward": pytest.approx(2000)}


def test_off_it_asks_no_device(device):
    device.is_asynchronous, device.has_events = True, False
    breakdown = Breakdown(times=False, memory=False)
    spend(breakdown, device, "forward", 1.0)
    assert isinstance(breakdown.timers, NoopTimer)
    assert breakdown.take_times() == {}
    assert device.num_waits == 0


def test_memory_without_times(device):
    breakdown = Breakdown(times=False, memory=True)
    spend(breakdown, device, "forward", 1.0)
    spend(breakdown, device, "backward_inner", 1.0)  # lies in "backward", where reading would cost it time
    window = breakdown.take_window()
    assert window.times_ms == {}
    assert window.memory_bytes == {"forward": (3 * 2**20, 5 * 2**20)}
    assert "| forward |           3.0 |      5.0 |" in step_table(window, [{}])


def test_a_table_of_one_rank():
    window = Window(4, {"backward": 10.0, "forward": 2.0}, {"forward": (2**20, 2**21)})
    assert step_table(window, [window.times_ms]).splitlines() == [
        "per step, mean of 4",
        "+--------------------------------------------+",
        "| phase    |   ms | allocated MiB | peak MiB |",
        "|----------+------+---------------+----------|",
        "| forward  | 0.50 |           1.0 |      2.0 |",
        "| backward | 2.50 |               |          |",
        "+--------------------------------------------+",
    ]


def test_a_table_of_many_ranks():
    window = Window(2, {"forward": 2.0})
    table = step_table(window, [{"forward": 2.0}, {"forward": 8.0}, {"forward": 5.0}])
    assert table.splitlines()[0] == "per step, mean of 2, 3 ranks"
    assert "| phase   |   ms |  min |  max |" in table
    assert "| forward | 2.50 | 1.00 | 4.00 |" in table


def test_a_table_before_a_step_ended_divides_by_one():
    assert "| forward | 2.00 |" in step_table(Window(0, {"forward": 2.0}), [{"forward": 2.0}])


def test_parts_of_a_forward():
    table = forward_table(20.0, {"fwd_attention": 5.0})
    assert "| forward         | 20.00 | 100.0 |" in table
    assert "|   fwd_attention |  5.00 |  25.0 |" in table
    assert "|     - |" in forward_table(0.0, {"fwd_x": 1.0})
