"""The user's command with a trial's configuration, results that are kept, and the table of them."""

import argparse
import base64
import json

import pytest
from deepspeed.autotuning.report import best_of, draw, score_of, summary
from deepspeed.autotuning.scheduler import Command, TrialResult, read_result, said_by
from deepspeed.autotuning.trial import write_json
from deepspeed.errors import ConfigError

CONFIG = {"train_micro_batch_size_per_gpu": "auto"}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return "ds.json"


def command(*arguments):
    return Command.of(
        argparse.Namespace(user_script="train.py", user_args=list(arguments), launcher_flags=["-i", "a:0"])
    )


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        (["--deepspeed_config", "ds.json", "x"], ["--deepspeed_config", "new", "x"]),
        (["--deepspeed", "--deepspeed_config=ds.json"], ["--deepspeed", "--deepspeed_config=new"]),
        (["-q", "--deepspeed", "ds.json"], ["-q", "--deepspeed", "new"]),
        (["--deepspeed", json.dumps(CONFIG)], ["--deepspeed", "new"]),
        (
            ["--deepspeed=" + base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()],
            ["--deepspeed=new"],
        ),
        (
            ["--deepspeed", "train", "--deepspeed_config", "ds.json"],
            ["--deepspeed", "train", "--deepspeed_config", "new"],
        ),
    ],
)
def test_each_way_to_give_a_configuration_is_found(config_file, arguments, replaced):
    found = command(*arguments)
    assert found.read_config() == CONFIG
    assert found.with_config("new", {}) == replaced
    assert found.line(["x y"]) == "deepspeed -i a:0 train.py 'x y'"


@pytest.mark.parametrize(
    "arguments", [[], ["--deepspeed"], ["--deepspeed", "--lr"], ["--deepspeed_config", "none.json"]]
)
def test_a_command_without_a_configuration_is_refused(config_file, arguments):
    with pytest.raises(ConfigError, match="--autotuning: found no configuration among the arguments of train.py"):
        command(*arguments)


def test_flags_of_the_script_are_told(config_file):
    found = command("--deepspeed_config", "ds.json", "-b", "8", "--zero=1")
    mapped = {"-b": 4, "--zero": 2, "--new": True}
    assert found.with_config("c", mapped) == ["--deepspeed_config", "c", "-b", "4", "--zero=2", "--new", "true"]
    assert said_by(found, {"micro ": "-b", "stage": "--zero", "other": "--absent"}) == {"micro": 8, "stage": 1}


def result(stage, micro, throughput, **others):
    metrics = {"throughput": throughput, "latency": 1000 / throughput, "peak_memory": 0} if throughput else {}
    settings = {"zero_optimization.stage": stage, "train_micro_batch_size_per_gpu": micro}
    reason = "" if throughput else "out of memory"
    return TrialResult(name=f"z{stage}_{micro}", settings=settings, fingerprint="f", session="s", metrics=metrics,
                       reason=reason, **others)  # fmt: skip


def test_results_are_read_as_they_were_written(tmp_path):
    written = result(1, 2, 3.0)
    write_json(tmp_path / "exp.json", vars(written))
    assert read_result(tmp_path / "exp.json") == written
    (tmp_path / "exp.json").write_text('{"name": "half')
    assert read_result(tmp_path / "exp.json") is None
    assert read_result(tmp_path / "none.json") is None
    assert [path.name for path in tmp_path.iterdir()] == ["exp.json"]


def test_the_best_is_best_in_the_metric():
    results = [result(0, 1, 10.0), result(0, 2, 20.0), result(1, 4, None)]
    assert best_of(results, "throughput") is results[1]
    assert score_of(results[2], "throughput") is None
    results[0].metrics["FLOPS_per_gpu"] = 5.0
    assert best_of(results, "FLOPS") is results[0]
    assert best_of(results, "latency") is results[1]
    assert best_of(results[2:], "latency") is None


def test_the_summary_has_a_line_for_each_stage():
    text = summary([result(0, 1, 10.0), result(0, 2, 20.0), result(1, 4, None)], "throughput", 1.0)
    lines = [line.replace(" ", "") for line in text.splitlines()]
    assert lines[2:5] == ["|z0|2|20|z0_2|", "|z1|1|-|-|", "|global|3|20|z0_2|"]
    assert text.splitlines()[-1] == "Tuning completed in 1.0 s. Total number of experiments: 3."


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "tuning.png"
    assert draw([result(0, 1, 10.0), result(0, 2, 20.0), result(1, 4, None)], "throughput", path) == f"picture: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "pip install matplotlib" in draw([result(0, 1, 10.0)], "throughput", tmp_path / "tuning.png")
