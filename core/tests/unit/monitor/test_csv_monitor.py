"""CSV files: names, headers, rows."""

import csv

import pytest
import torch
from deepspeed.config.monitor import CSVConfig
from deepspeed.monitor.csv_monitor import csvMonitor


def monitor_in(folder, **keys):
    return csvMonitor(CSVConfig(enabled=True, output_path=str(folder), job_name="job", **keys))


def rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_one_file_per_event_name(tmp_path):
    monitor = monitor_in(tmp_path)
    monitor.write_events([("Train/Samples/train_loss", 0.5, 4), ("Time per step", 3, 4)])
    monitor.write_events([("Train/Samples/train_loss", 0.25, 8)])
    files = {path.name: rows(path) for path in (tmp_path / "job").iterdir()}
    assert files == {
        "Train_Samples_train_loss.csv": [["step", "train_loss"], ["4", "0.5"], ["8", "0.25"]],
        "Time_per_step.csv": [["step", "Time per step"], ["4", "3"]],
    }


def test_a_run_that_goes_on_appends(tmp_path):
    for step in (1, 2):
        monitor_in(tmp_path).write_events([("x", 0.5, step)])
    assert rows(tmp_path / "job/x.csv") == [["step", "x"], ["1", "0.5"], ["2", "0.5"]]


def test_tensors_are_written_as_numbers(tmp_path):
    monitor_in(tmp_path).write_events([("x", torch.tensor([0.25], requires_grad=True), 1), ("y", float("inf"), 1)])
    assert rows(tmp_path / "job/x.csv")[1] == ["1", "0.25"]
    assert rows(tmp_path / "job/y.csv")[1] == ["1", "inf"]


def test_a_value_that_is_no_number_is_the_callers_error(tmp_path):
    with pytest.raises(RuntimeError):
        monitor_in(tmp_path).write_events([("x", torch.ones(2), 1)])


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_path_it_is_below_the_working_directory(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    csvMonitor(CSVConfig(enabled=True, output_path=path)).write_events([("x", 1, 1)])
    assert (tmp_path / "DeepSpeedJobName/x.csv").exists()


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    csvMonitor(CSVConfig(enabled=True, output_path="~/logs", job_name="job"))
    assert (tmp_path / "logs/job").is_dir()


def test_switched_off_it_makes_nothing(tmp_path):
    monitor = csvMonitor(CSVConfig(output_path=str(tmp_path)))
    monitor.write_events([("x", 1, 1)])
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_another_rank_makes_nothing(tmp_path, another_rank):
    monitor = monitor_in(tmp_path)
    monitor.write_events([("x", 1, 1)])
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []
