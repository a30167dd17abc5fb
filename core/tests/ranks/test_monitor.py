"""Monitors and tables on two ranks: rank 0 writes, one row per step; nothing that watches stops or changes training."""

import csv
import logging
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.log import logger
from deepspeed.plugins import hookimpl
from deepspeed.plugins.manager import FEATURES, plugin_manager
from deepspeed.testing.distributed import run_ranks
from torch import nn

NUM_STEPS = 3
TIMES = ["forward", "backward", "backward_inner", "backward_allreduce", "step"]


def train(num_steps=NUM_STEPS, **keys):
    """Two micro-batches of 2 samples per rank and step, that is 8 samples a step; the engine and the mean losses."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
        **keys,
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(3, 1), config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps * 2):
        loss = engine(torch.randn(2, 3, generator=generator)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return engine, [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]


def weights(engine):
    return [param.detach().clone() for param in engine.module.parameters()]


# ---- rank 0 writes --------------------------------------------------------------------------------------------------


def train_with_csv_files(folder):
    section = {"enabled": True, "output_path": f"{folder}/rank{dist.get_rank()}", "job_name": "job"}
    engine, losses = train(csv_monitor=section, wall_clock_breakdown=True)
    engine.monitor.write_events([("mine", dist.get_rank(), engine.global_samples)])
    engine.destroy()
    return engine.monitor.enabled, losses


def test_rank_0_writes_one_row_per_step(tmp_path):
    (enabled, losses), (enabled_too, _) = run_ranks(2, train_with_csv_files, str(tmp_path))
    assert enabled
    assert enabled_too
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]
    files = {
        path.stem: list(csv.reader(path.read_text().splitlines())) for path in Path(tmp_path, "rank0/job").iterdir()
    }
    assert sorted(files) == sorted(
        ["mine", "Train_Samples_train_loss", "Train_Samples_lr"]
        + [f"Train_Samples_elapsed_time_ms_{phase}" for phase in TIMES]
    )
    for name, (header, *rows) in files.items():
        if name == "mine":
            assert rows == [["24", "0"]]
            continue
        assert header == ["step", name.removeprefix("Train_Samples_")]
        assert [step for step, _ in rows] == ["8", "16", "24"]
    assert [float(value) for _, value in files["Train_Samples_train_loss"][1:]] == pytest.approx(losses)
    assert [float(value) for _, value in files["Train_Samples_lr"][1:]] == [0.1] * 3
    assert all(float(value) >= 0 for phase in TIMES for _, value in files[f"Train_Samples_elapsed_time_ms_{phase}"][1:])


# ---- nothing stops training -----------------------------------------------------------------------------------------


class Failing:
    """A plugin whose monitor fails in writing."""

    class Monitor:
        def write_events(self, events):
            raise OSError("no space left on the monitor's disk")

    @hookimpl
    def ds_monitor(self, name, arguments):
        return self.Monitor() if name == "failing" else None


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def train_and_listen(**keys):
    said = Said()
    logger.addHandler(said)
    try:
        engine, _ = train(**keys)
        engine.destroy()
    finally:
        logger.removeHandler(said)
    return weights(engine), said.lines


def train_with_a_monitor_that_fails():
    manager = plugin_manager()
    assert manager.hook is not None  # the feature plugins of this environment come first
    manager.register(Failing(), "failing", FEATURES)
    manager.activate("failing", FEATURES)
    try:
        return *train_and_listen(monitor_plugins={"failing": {}}), train_and_listen()[0]
    finally:
        manager.deactivate("failing", FEATURES)
        manager.unregister("failing", FEATURES)


def test_a_monitor_that_fails_does_not_stop_training():
    first, second = run_ranks(2, train_with_a_monitor_that_fails)
    told = [line for line in first[1] if line.startswith("monitor failing: writing failed: OSError: no space left")]
    assert len(told) == 1
    assert not any("monitor" in line for line in second[1])
    for watched, _, plain in (first, second):
        assert all(map(torch.equal, watched, plain))


# ---- tables ---------------------------------------------------------------------------------------------------------


def train_with_tables():
    return train_and_listen(wall_clock_breakdown=True, steps_per_print=2, num_steps=4)[1]


def test_the_table_is_of_both_ranks_and_rank_0_prints_it():
    first, second = run_ranks(2, train_with_tables)
    tables = [line for line in first if "per step, mean of 2, 2 ranks" in line]
    assert len(tables) == 2
    assert all(f"| {phase} " in table for table in tables for phase in TIMES)
    assert not any("per step" in line for line in second)


def train_with_a_configuration_of_its_own():
    is_silent = dist.get_rank() > 0
    return train_and_listen(wall_clock_breakdown=True, steps_per_print=1_000_000 if is_silent else 1)[1]


def test_a_rank_that_prints_nothing_is_not_waited_for():
    first, second = run_ranks(2, train_with_a_configuration_of_its_own)
    assert len([line for line in first if "per step, mean of 1" in line]) == NUM_STEPS
    assert not any("2 ranks" in line for line in first if "per step" in line)
    assert second == []


# ---- the comms logger -----------------------------------------------------------------------------------------------


def train_with_comms_logger():
    train(comms_logger={"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter", "all_gather"]})
    rows = {op: sum(row[0] for row in sizes.values()) for op, sizes in dist.comms_logger.comms_dict.items()}
    return rows, dist.log_summary()


def test_collectives_of_training_are_recorded():
    for rows, table in run_ranks(2, train_with_comms_logger):
        assert set(rows) == {"reduce_scatter", "all_gather"}
        assert all(count >= NUM_STEPS for count in rows.values())
        assert "reduce_scatter" in table


def summary_of_given_times(show_straggler):
    rank = dist.get_rank()
    dist.comms_logger.add("all_reduce", 2048, 0.002 if rank == 0 else 0.005)
    dist.comms_logger.add("all_reduce", 2048, 0.004 if rank == 0 else 0.001)
    for _ in range(1 + rank):
        dist.comms_logger.add("broadcast", 64, 0.001)  # not as often on both
    figures = dist.log_summary(show_straggler, return_dict=True)
    table = dist.log_summary(show_straggler)
    dist.comms_logger.reset()
    return figures, table


def test_a_rank_waits_for_what_exceeds_the_shortest_time():
    for rank, (figures, table) in enumerate(run_ranks(2, summary_of_given_times, True)):
        (row,) = figures["straggler_analysis"].pop("all_reduce").values()
        assert figures["straggler_analysis"] == {}
        assert row == pytest.approx(
            {
                **{"count": 2, "total_comm_lat_ms": 3, "total_straggler_ms": 3},
                **{"avg_comm_lat_ms": 1.5, "avg_straggler_ms": 1.5},
            }
        )
        assert figures["metadata"] == {"world_size": 2, "rank": rank}
        assert figures["summary"]["all_reduce"][2048]["total_latency_ms"] == pytest.approx(6)
        heading, op, line = table[table.index("Breakdown with straggler effect") :].splitlines()[2:]
        assert heading.split("  ")[0] == "Comm. Op"
        assert "Total straggler(ms)" in heading
        assert op == "all_reduce"
        assert line.split() == ["2.0", "KB", "2", "3.00", "3.00", "1.50", "1.50"]


def test_a_summary_without_stragglers_is_no_collective():
    figures, table = run_ranks(2, summary_of_given_times, False)[1]
    assert figures["straggler_analysis"] is None
    assert figures["summary"]["broadcast"][64]["count"] == 2
    assert "straggler" not in table


# ---- the profile of one step ----------------------------------------------------------------------------------------


def train_profiled(folder, stage):
    path = Path(folder, f"rank{dist.get_rank()}.txt")
    section = {"enabled": True, "profile_step": 1, "output_file": str(path)}
    engine, losses = train(flops_profiler=section, zero_optimization={"stage": stage})
    weights_of_run = [weight.double().sum().item() for weight in engine.module.state_dict().values()]
    engine.destroy()
    return losses, weights_of_run


def train_unprofiled(stage):
    engine, losses = train(zero_optimization={"stage": stage})
    weights_of_run = [weight.double().sum().item() for weight in engine.module.state_dict().values()]
    engine.destroy()
    return losses, weights_of_run


@pytest.mark.parametrize("stage", [0, 3])
def test_rank_0_profiles_one_step_which_stays_as_it_is(stage, tmp_path):
    assert run_ranks(2, train_profiled, str(tmp_path), stage) == run_ranks(2, train_unprofiled, stage)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.txt"]
    lines = [line.strip() for line in (tmp_path / "rank0.txt").read_text().splitlines()]
    figures = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {name: figures[name].strip() for name in ("ranks", "parameters", "forward FLOPs", "backward FLOPs")}
    # two micro-batches of two samples; the inputs need no gradient
    assert found == {"ranks": "2", "parameters": "4", "forward FLOPs": "24", "backward FLOPs": "24"}
