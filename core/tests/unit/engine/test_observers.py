"""Who watches the engine: events, lines and tables of a run, and that nothing is read which nobody asked for."""

import csv
import logging
import math

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.engine.observers import Progress, StepStats
from deepspeed.log import logger, warn_once
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).float()


def train(engine, num_micro=1):
    """Losses of so many micro-batches."""
    losses = []
    for index in range(num_micro):
        loss = engine(torch.full((1, 4), float(index))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def tables(lines):
    return [text for _, text in lines if text.startswith("time and memory by phase")]


@pytest.fixture
def events(tmp_path):
    """Section of the CSV monitor, and a function that reads its rows: short name -> [(step, value)]."""
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}

    def read():
        found = {}
        for path in (tmp_path / "job").iterdir():
            _, *rows = csv.reader(path.read_text().splitlines())
            found[path.stem.removeprefix("Train_Samples_")] = [(int(step), float(value)) for step, value in rows]
        return found

    return section, read


# ---- events ---------------------------------------------------------------------------------------------------------


def test_loss_and_rate_of_each_step(make_engine, events):
    section, read = events
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_type": "linear"}}
    engine = make_engine(Net(), csv_monitor=section, scheduler=schedule, **config)
    rates, losses = [], []
    for _ in range(3):
        losses += train(engine, 2)
        rates.append(engine.get_lr()[0])
    assert set(read()) == {"train_loss", "lr"}
    assert read()["lr"] == list(zip([4, 8, 12], rates, strict=True))
    means = [(losses[i] + losses[i + 1]) / 2 for i in (0, 2, 4)]
    assert [step for step, _ in read()["train_loss"]] == [4, 8, 12]
    assert [loss for _, loss in read()["train_loss"]] == pytest.approx(means)
    assert isinstance(engine.monitor, MonitorMaster)


def test_the_loss_scale_with_fp16(make_engine, events):
    section, read = events
    engine = make_engine(Net(), csv_monitor=section, fp16={"enabled": True, "initial_scale_power": 3})
    train(engine, 2)
    assert read()["loss_scale"] == [(4, 8.0), (8, 8.0)]


def test_a_skipped_step_has_its_row(make_engine, events):
    section, read = events
    fp16 = {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}
    engine = make_engine(Net(), csv_monitor=section, fp16=fp16)
    engine.backward(engine(torch.full((1, 4), 60000.0)).square().mean())
    engine.step()
    train(engine)
    assert not engine.skipped_steps - 1
    assert read()["loss_scale"] == [(4, 8.0), (8, 4.0)]


def test_a_loss_that_the_engine_did_not_see_has_no_row(make_engine, events):
    section, read = events
    engine = make_engine(Net(), csv_monitor=section)
    engine(torch.ones(1, 4)).sum().backward()
    engine.step()
    assert set(read()) == {"lr"}


def test_two_losses_of_one_step_add_up(make_engine, events):
    section, read = events
    engine = make_engine(Net(), csv_monitor=section)
    output = engine(torch.ones(1, 4))
    first, second = output.square().mean(), output.abs().mean()
    engine.backward(first, retain_graph=True)
    engine.backward(second)
    engine.step()
    assert read()["train_loss"] == [(4, pytest.approx(first.item() + second.item()))]


def test_times_of_each_step(make_engine, events):
    section, read = events
    engine = make_engine(Net(), csv_monitor=section, wall_clock_breakdown=True, steps_per_print=2)
    train(engine, 3)
    times = {name: rows for name, rows in read().items() if name.startswith("elapsed_time_ms_")}
    assert set(times) == {
        f"elapsed_time_ms_{phase}" for phase in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    }
    assert all([step for step, _ in rows] == [4, 8, 12] for rows in times.values())
    assert all(value > 0 for rows in times.values() for _, value in rows)


def test_without_a_monitor_no_loss_is_kept(make_engine, monkeypatch):
    engine = make_engine(Net())
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("a value was read from the device"))
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert engine._observers._loss is None
    engine.step()


def test_the_end_closes_the_monitors(make_engine, events):
    section, read = events
    engine = make_engine(Net(), csv_monitor=section)
    train(engine)
    engine.destroy()
    engine.monitor.write_events([("late", 1, 1)])
    assert "late" not in read()


def test_a_monitor_that_cannot_be_closed_leaves_nothing_else_open(make_engine, monkeypatch):
    engine = make_engine(Net(), zero_optimization={"stage": 2})
    train(engine)
    released = []
    for ranks in engine.sharding.backends:
        monkeypatch.setattr(ranks, "release", lambda ranks=ranks: released.append(ranks))
    monkeypatch.setattr(engine.monitor, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.destroy()
    assert released == engine.sharding.backends
    assert (engine.optimizer, engine.basic_optimizer, engine.lr_scheduler) == (None, None, None)
    deepspeed.initialize(model=engine.module, config={"train_batch_size": 1})[0].destroy()  # no hooks are left


# ---- timers ---------------------------------------------------------------------------------------------------------


def test_timers_are_the_documented_ones(make_engine):
    engine = make_engine(Net(), wall_clock_breakdown=True)
    assert isinstance(engine.timers, SynchronizedWallClockTimer)
    train(engine)
    assert {name for name, timer in engine.timers.get_timers().items() if timer.elapsed() > 0} == {
        *("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")
    }
    assert isinstance(make_engine(Net()).timers, NoopTimer)


def test_an_evaluation_is_no_part_of_a_step(make_engine):
    engine = make_engine(Net(), wall_clock_breakdown=True)
    with torch.no_grad():
        engine(torch.ones(1, 4))
    assert not engine.timers.has_timer("fwd")
    assert not engine.tput_timer.started


def test_a_forward_that_fails_can_be_repeated(make_engine):
    engine = make_engine(Net(), wall_clock_breakdown=True)
    with pytest.raises(RuntimeError):
        engine(torch.ones(1, 5))
    train(engine)


def test_the_throughput_timer_counts_steps_and_follows_the_batch_size(make_engine):
    engine = make_engine(Net(), train_batch_size=4, gradient_accumulation_steps=2)
    assert isinstance(engine.tput_timer, ThroughputTimer)
    train(engine, 4)
    assert (engine.tput_timer.global_step_count, engine.tput_timer.micro_step_count) == (2, 4)
    engine.set_train_batch_size(2)
    train(engine)
    assert (engine.tput_timer.global_step_count, engine.tput_timer.batch_size) == (3, 2)


def test_the_throughput_timer_can_be_off(make_engine):
    engine = make_engine(Net(), timers={"throughput": {"enabled": False}})
    train(engine)
    assert engine.tput_timer.global_step_count == 0


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_speed_is_printed_with_the_steps(make_engine, lines):
    train(make_engine(Net(), steps_per_print=2), 5)
    said = [text.split(", ")[0] for _, text in lines if "SamplesPerSec" in text]
    assert said == ["epoch=0/micro_step=4/global_step=4"]  # the first two steps do not count


def test_nothing_is_measured_for_lines_that_nobody_sees(make_engine, monkeypatch):
    monkeypatch.setattr(ThroughputTimer, "avg_samples_per_sec", lambda timer: pytest.fail("the speed was read"))
    train(make_engine(Net(), steps_per_print=float("inf")), 10)
    with pytest.raises(pytest.fail.Exception, match="the speed was read"):
        train(make_engine(Net(), steps_per_print=10), 10)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        train(make_engine(Net(), steps_per_print=10), 10)
    finally:
        logger.setLevel(level)


def test_a_norm_that_stayed_on_the_device_is_checked_where_a_line_is_due(make_engine, lines):
    warn_once.cache_clear()
    observers = make_engine(Net(), steps_per_print=2)._training.observers
    stats = StepStats(global_step=0, applied=True, norm=torch.tensor(float("nan")), loss_scale=1.0)
    found = []
    for step in (1, 2):
        observers.step_ended(stats, Progress(global_steps=step), batch_size=4, lr=[0.1], momentum=[])
        found.append(any("norm of the gradients is nan" in text for _, text in lines))
    assert found == [False, True]
    assert math.isnan(stats.grad_norm)
    assert type(stats.grad_norm) is float


def test_memory_by_phase(make_engine, lines):
    train(make_engine(Net(), memory_breakdown=True, steps_per_print=2), 2)
    (table,) = tables(lines)
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows == ["phase", "forward", "backward", "step"]
    assert "allocated MiB" in table
    assert " ms " not in table


def test_no_table_without_steps_per_print(make_engine, lines):
    train(make_engine(Net(), wall_clock_breakdown=True, steps_per_print=float("inf")), 3)
    assert tables(lines) == []


@pytest.mark.parametrize("asked", ["wall_clock_breakdown", "memory_breakdown"])
def test_a_table_every_ten_steps_where_steps_per_print_does_not_say_it(make_engine, lines, asked):
    train(make_engine(Net(), **{asked: True}), 20)
    assert len(tables(lines)) == 2


def test_a_table_with_a_monitor_has_all_steps_of_its_window(make_engine, events, lines):
    section, read = events
    engine = make_engine(Net(), csv_monitor=section, wall_clock_breakdown=True, steps_per_print=2)
    train(engine, 4)
    printed = [float(table.split("| forward ")[1].split("|")[1]) for table in tables(lines)]
    rows = [value for _, value in read()["elapsed_time_ms_forward"]]
    assert printed == pytest.approx([sum(rows[:2]) / 2, sum(rows[2:]) / 2], abs=0.006)


def test_parts_of_a_forward_are_printed(make_engine, lines):
    engine = make_engine(Net(), wall_clock_breakdown=True)
    engine.timers("fwd_attention").start()
    engine.timers("fwd_attention").stop()
    engine.print_forward_breakdown(fwd_time=8.0)
    (printed,) = [text for _, text in lines if text.startswith("time of a forward")]
    assert "| forward         | 8.00 | 100.0 |" in printed
    assert "|   fwd_attention | " in printed


# ---- the comms logger -----------------------------------------------------------------------------------------------


@pytest.fixture
def comms_logger():
    yield dist.comms_logger
    dist.comms_logger.reset()
    dist.comms_logger.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)


def test_the_configuration_turns_the_comms_logger_on(make_engine, comms_logger, lines):
    engine = make_engine(Net(), zero_optimization={"stage": 1}, comms_logger={"enabled": True, "verbose": True})
    train(engine)
    assert {"reduce_scatter", "all_gather"} <= set(comms_logger.comms_dict)
    assert any(text.startswith("comm reduce_scatter: ") for _, text in lines)
    lines.clear()
    assert dist.log_summary() in lines[0][1]


def test_the_caller_is_named_with_debug(make_engine, comms_logger):
    make_engine(Net(), comms_logger={"enabled": True, "debug": True})
    dist.barrier()
    assert list(comms_logger.comms_dict) == ["barrier | [Caller Func: test_the_caller_is_named_with_debug]"]


def test_a_comms_logger_that_the_user_turned_on_stays_on(make_engine, comms_logger):
    dist.configure(enabled=True)
    make_engine(Net())
    assert comms_logger.enabled
