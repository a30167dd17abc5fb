"""Samples per second, with a clock that the test turns."""

import re

import pytest
from deepspeed.config.monitor import ThroughputTimerConfig
from deepspeed.profiling.timer import ThroughputTimer


def train(timer, device, seconds, num_micro=1):
    """One step; as much time passes between two steps, which does not count."""
    for micro in range(num_micro):
        timer.start()
        device.now_s += seconds / num_micro
        timer.stop(global_step=micro + 1 == num_micro)
    device.now_s += 3.0


def test_average_over_the_steps_that_count(device):
    timer = ThroughputTimer(ThroughputTimerConfig(), batch_size=8, start_step=2)
    assert timer.avg_samples_per_sec() == float("-inf")
    for seconds in (50.0, 40.0, 1.0, 3.0):
        train(timer, device, seconds, num_micro=2)
    assert timer.avg_samples_per_sec() == pytest.approx(16 / 4)
    assert (timer.global_step_count, timer.micro_step_count) == (4, 8)
    assert timer.total_elapsed_time == pytest.approx(4.0)


def test_lines_tell_the_average_and_the_latest(device):
    said = []
    timer = ThroughputTimer(None, 8, start_step=0, steps_per_output=2, logging_fn=said.append)
    for seconds in (1.0, 1.0, 3.0, 3.0, 1.0):
        train(timer, device, seconds)
    assert said == [
        "epoch=0/micro_step=2/global_step=2, RunningAvgSamplesPerSec=8, CurrSamplesPerSec=8, "
        "MemAllocated=0.00GB, MaxMemAllocated=0.00GB",
        "epoch=0/micro_step=4/global_step=4, RunningAvgSamplesPerSec=4, CurrSamplesPerSec=2.66667, "
        "MemAllocated=0.00GB, MaxMemAllocated=0.00GB",
    ]
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_lines_with_the_memory_of_the_host(device):
    said = []
    timer = ThroughputTimer(None, 1, start_step=0, steps_per_output=1, monitor_memory=True, logging_fn=said.append)
    train(timer, device, 1.0)
    assert re.search(r", vm %: [\d.]+, swap %: [\d.]+$", said[0])


def test_lines_with_the_utilization_of_the_device(device):
    """Two steps in 8 s, of which each takes a second at the peak."""
    said = []
    timer = ThroughputTimer(None, 8, start_step=0, steps_per_output=2, logging_fn=said.append)
    timer.ideal_step_s = 1.0
    for seconds in (5.0, 3.0):
        train(timer, device, seconds)
    assert said[0].endswith(", MFU=25.00%")


def test_nothing_to_tell_yet(device):
    said = []
    timer = ThroughputTimer(None, 8, start_step=2, steps_per_output=1, logging_fn=said.append)
    train(timer, device, 1.0)
    assert said == []


def test_a_line_can_be_held_back(device):
    said = []
    timer = ThroughputTimer(None, 1, start_step=0, steps_per_output=1, logging_fn=said.append)
    timer.start()
    device.now_s += 1.0
    timer.stop(global_step=True, report_speed=False)
    assert said == []


def test_batch_sizes_may_change(device):
    timer = ThroughputTimer(None, 8, start_step=0)
    train(timer, device, 1.0)
    timer.batch_size = 2
    train(timer, device, 1.0)
    assert timer.avg_samples_per_sec() == pytest.approx(5.0)


def test_off_it_measures_nothing(device):
    timer = ThroughputTimer(ThroughputTimerConfig(enabled=False), 8, start_step=0)
    train(timer, device, 1.0)
    assert (timer.global_step_count, timer.avg_samples_per_sec()) == (0, float("-inf"))


def test_a_second_start_changes_nothing_and_a_stop_alone_counts_nothing(device):
    timer = ThroughputTimer(None, 4, start_step=0)
    timer.stop(global_step=True)
    timer.start()
    device.now_s += 1.0
    timer.start()
    device.now_s += 1.0
    timer.stop(global_step=True)
    assert timer.global_step_count == 1
    assert timer.avg_samples_per_sec() == pytest.approx(2.0)


@pytest.mark.parametrize(("synchronized", "seconds"), [(True, 2.5), (False, 0.5)])
def test_the_device_is_waited_for_when_the_speed_is_read(device, synchronized, seconds):
    device.is_asynchronous = True
    timer = ThroughputTimer(ThroughputTimerConfig(synchronized=synchronized), 5, start_step=0)
    timer.start()
    device.now_s, device.lag_s = 0.5, 2.0
    timer.stop(global_step=True)
    assert device.num_waits == 0
    assert timer.avg_samples_per_sec() == pytest.approx(5 / seconds)
    assert device.num_waits == int(synchronized)
