"""An engine of a trial: it measures the steps that the section names, writes its file, and ends the process."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from torch import nn


def steps(engine, number, width=4):
    """Make steps until the process is told to end; how many were begun."""
    for made in range(number):
        try:
            engine.backward(engine(torch.randn(4, width)).pow(2).mean())
            engine.step()
        except SystemExit as end:
            if end.code != 0:
                raise
            return made + 1
    return None


def autotuning(**section):
    return {"enabled": True, **section}


def test_steps_are_measured_and_end_the_process(make_engine, tmp_path):
    path = tmp_path / "new" / "metrics.json"
    section = autotuning(metric_path=str(path), start_profile_step=2, end_profile_step=4)
    engine = make_engine(nn.Linear(4, 2), autotuning=section)
    assert steps(engine, 10) == 4
    metrics = json.loads(path.read_text())
    assert metrics["steps"] == 3
    assert metrics["train_batch_size"] == metrics["micro_batch"] == 4
    assert metrics["throughput"] == pytest.approx(4 / metrics["latency"] * 1e3)
    assert metrics["peak_memory"] > 0
    assert "FLOPS_per_gpu" not in metrics
    assert (engine.autotuning_metric_path(), engine.autotuning_profile_model_info()) == (str(path), False)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 1), (3, 3)])
def test_operations_are_counted_where_they_decide(make_engine, tmp_path, first, last):
    path = tmp_path / "metrics.json"
    section = autotuning(metric="FLOPS", metric_path=str(path), start_profile_step=first, end_profile_step=last)
    assert steps(make_engine(nn.Linear(4, 2, bias=False), autotuning=section), 10) == last
    metrics = json.loads(path.read_text())
    # forward and the gradient of the weights: 2 x 4 x 4 x 2 operations each
    assert metrics["FLOPS_per_gpu"] == pytest.approx(128 / metrics["latency"] * 1e3)


def test_a_job_finds_out_about_its_model(make_engine, tmp_path):
    path = tmp_path / "info.json"
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model[0].bias.requires_grad_(False)
    section = autotuning(model_info={"profile": True}, model_info_path=str(path))
    engine = make_engine(model, autotuning=section)
    assert engine.autotuning_profile_model_info() is True
    assert steps(engine, 3) == 1
    info = json.loads(path.read_text())
    assert (info["num_params"], info["trainable_num_params"]) == (4 * 6 + 6 + 6 * 2 + 2, 4 * 6 + 6 * 2 + 2)
    assert info["parameters"][1] == ["0.bias", 6, False]
    # the input of each layer, 4 x 4 and 4 x 6 (which is relu's output too), and the input of the square, 4 x 2
    assert info["activation_mem_per_gpu"] == 4 * (16 + 24 + 8) - 4 * 8  # the last is saved outside of the forward
    assert info["memory_per_gpu"] > 0
    assert (info["world_size"], info["micro_batch"]) == (1, 4)


def test_on_a_host_what_the_job_has_itself_is_no_lack(make_engine, tmp_path, monkeypatch):
    path = tmp_path / "info.json"
    engine = make_engine(
        nn.Linear(4, 2), autotuning=autotuning(model_info={"profile": True}, model_info_path=str(path))
    )
    accelerator = get_accelerator()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(accelerator, "available_memory", lambda: 600)
    monkeypatch.setattr(accelerator, "memory_allocated", lambda: 50)
    assert steps(engine, 1) == 1
    assert json.loads(path.read_text())["memory_per_gpu"] == 600 // 2 + 50


def test_an_end_before_the_beginning_is_refused(make_engine, tmp_path):
    section = autotuning(metric_path=str(tmp_path / "m"), start_profile_step=7, end_profile_step=5)
    with pytest.raises(ConfigError, match=r"end_profile_step: found 5, which is before start_profile_step \(7\)"):
        make_engine(nn.Linear(4, 2), autotuning=section)


def test_without_a_file_training_goes_on(make_engine, lines):
    assert steps(make_engine(nn.Linear(4, 2), autotuning=autotuning()), 8) is None
    assert any("autotuning.enabled: found true without metric_path" in text for _, text in lines)


def test_a_section_that_is_off_is_nothing(make_engine, tmp_path):
    path = tmp_path / "m"
    assert steps(make_engine(nn.Linear(4, 2), autotuning={"enabled": False, "metric_path": str(path)}), 8) is None
    assert not path.exists()


@pytest.mark.parametrize(
    ("section", "found"), [({"tuner_type": "grid"}, "tuner_type: found 'grid'"), ({"metric": "speed"}, "metric: found")]
)
def test_words_that_mean_nothing_are_refused(make_engine, section, found):
    with pytest.raises(ConfigError, match=rf"autotuning\.{found}"):
        make_engine(nn.Linear(4, 2), autotuning=section)


def test_a_step_that_waited_for_others_on_the_host_changes_no_figure(make_engine, tmp_path, monkeypatch):
    # the first step ends; the clock of the next four starts, and they end
    clock = itertools.accumulate([0.0, 9.0, 1.0, 1.0, 50.0, 1.0])
    path = tmp_path / "metrics.json"
    section = autotuning(metric_path=str(path), start_profile_step=2, end_profile_step=5)
    monkeypatch.setattr("deepspeed.autotuning.trial.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert steps(make_engine(nn.Linear(4, 2), autotuning=section), 10) == 5
    assert json.loads(path.read_text())["latency"] == 1000.0


def test_loading_of_data_counts_in_the_first_measured_step_too(make_engine, tmp_path, monkeypatch):
    now = [0.0]
    path = tmp_path / "metrics.json"
    section = autotuning(metric_path=str(path), start_profile_step=2, end_profile_step=2)
    monkeypatch.setattr("deepspeed.autotuning.trial.time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = make_engine(nn.Linear(4, 2), autotuning=section)
    assert steps(engine, 1) is None
    now[0] += 5.0
    assert steps(engine, 1) == 1
    assert json.loads(path.read_text())["latency"] == 5000.0


def test_a_script_that_catches_the_end_changes_no_figure(make_engine, tmp_path):
    path = tmp_path / "metrics.json"
    section = autotuning(metric_path=str(path), start_profile_step=1, end_profile_step=1)
    engine = make_engine(nn.Linear(4, 2), autotuning=section)
    assert steps(engine, 1) == 1
    written = path.read_bytes()
    assert steps(engine, 1) == 1
    assert path.read_bytes() == written
