"""The user's command with a trial's configuration, results that are kept, and the table of them."""

import argparse
import base64
import json
import math
import signal
import sys
from pathlib import Path

import pytest
from deepspeed.autotuning.autotuner import Autotuner, _signals, tune_command
from deepspeed.autotuning.report import LiveTable, best_of, draw, score_of, summary
from deepspeed.autotuning.scheduler import Command, ResourceManager, TrialResult, read_result, said_by
from deepspeed.autotuning.space import ModelInfo, Space
from deepspeed.autotuning.trial import write_json
from deepspeed.errors import ConfigError

CONFIG = {"train_micro_batch_size_per_gpu": "auto"}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("no configuration")
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
        (
            ["--deepspeed", "notes.txt", "--deepspeed_config", "ds.json"],
            ["--deepspeed", "notes.txt", "--deepspeed_config", "new"],
        ),
        (
            ["--deepspeed", "other.json", "--deepspeed_config=ds.json"],
            ["--deepspeed", "other.json", "--deepspeed_config=new"],
        ),
    ],
)
def test_each_way_to_give_a_configuration_is_found(config_file, arguments, replaced):
    found = command(*arguments)
    assert found.read_config() == CONFIG
    assert found.with_config("new", {}) == replaced
    assert found.line(["x y"]) == "deepspeed -i a:0 train.py 'x y'"


@pytest.mark.parametrize("given", [["--deepspeed_config", "none.json"], ["--deepspeed=none.json"]])
def test_a_configuration_that_cannot_be_read_is_named(config_file, given):
    with pytest.raises(ConfigError, match=r"none\.json.*(no|not).*file"):
        command(*given)


def test_a_malformed_configuration_after_deepspeed_is_named(config_file):
    Path("bad.json").write_text("{bad")
    with pytest.raises(ConfigError, match=r"bad\.json.*neither JSON nor hjson"):
        command("--deepspeed", "bad.json")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--deepspeed"], ["--deepspeed", "--lr"], ["--deepspeed_config", "none.json"], ["--deepspeed", "notes.txt"]],
)
def test_a_command_without_a_configuration_is_refused(config_file, arguments):
    with pytest.raises(ConfigError, match="--autotuning: found no configuration among the arguments of train.py"):
        command(*arguments)


def test_flags_of_the_script_are_told(config_file):
    found = command("--deepspeed_config", "ds.json", "-b", "8", "--zero=1")
    mapped = {"-b": 4, "--zero": 2, "--new": True}
    assert found.with_config("c", mapped) == ["--deepspeed_config", "c", "-b", "4", "--zero=2", "--new", "true"]
    assert said_by(found, {"micro ": "-b", "stage": "--zero", "other": "--absent"}) == {"micro": 8, "stage": 1}


def test_a_switch_keeps_the_word_after_it(config_file):
    found = command("--deepspeed_config", "ds.json", "--bf16", "--lr", "1e-3", "--fp16", "-b", "-1", "--last")
    kept = ["--deepspeed_config", "c", "--bf16", "--lr", "1e-3"]
    assert found.with_config("c", {"--bf16": True, "--fp16": False, "-b": 4}) == [*kept, "-b", "4", "--last"]
    assert found.with_config("c", {"--last": 2})[-2:] == ["--last", "2"]
    assert found.value_of("--bf16") is None


def test_each_place_of_a_flag_gets_the_value(config_file):
    found = command("-b", "1", "--deepspeed_config", "ds.json", "-b=2", "-b", "8")
    assert found.with_config("c", {"-b": 4}) == ["-b", "4", "--deepspeed_config", "c", "-b=4", "-b", "4"]
    assert said_by(found, {"micro": "-b"}) == {"micro": 8}


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


def test_a_picture_that_cannot_be_drawn_is_no_failure(tmp_path):
    pytest.importorskip("matplotlib")
    found = draw([result(0, 1, 10.0)], "throughput", tmp_path / "none" / "tuning.png")
    assert found.startswith("no picture was drawn: FileNotFoundError: ")


# ---- jobs -------------------------------------------------------------------------------------------------------

#: what a trial's engine would do; the path of its configuration is the last word
MEASURES = """
import json, sys
section = json.load(open(sys.argv[-1]))["autotuning"]
json.dump({"throughput": 2.0, "latency": 1.0, "peak_memory": 0}, open(section["metric_path"], "w"))
"""
SHOWN = "deepspeed: rank 0 ended. Its last words on stderr, shown above: KeyError: 1"
AS_WELL = f"{SHOWN}\ndeepspeed: rank 1 failed as well: "
ENDS = {
    "pass": "the script ended before its steps were measured; let it make end_profile_step steps or more",
    "raise SystemExit(3)": "exit code 3: it wrote nothing to stderr",
    "raise ValueError('no data')": "exit code 1: ValueError: no data",
    "raise MemoryError('too much')": "out of memory: MemoryError: too much",
    "import os; os.kill(os.getpid(), 9)": "out of memory: a process was killed by SIGKILL, as the kernel does when the "
    "host has no more",
    f"raise SystemExit({SHOWN!r})": "exit code 1: KeyError: 1",
    "import sys; print('beware of out of memory', file=sys.stderr); raise KeyError(1)": "exit code 1: KeyError: 1",
    f"raise SystemExit({AS_WELL + 'ValueError: 2'!r})": "exit code 1: KeyError: 1",
    f"raise SystemExit({AS_WELL + 'MemoryError: 2'!r})": "out of memory: KeyError: 1",
    r"raise SystemExit('0: torch.OutOfMemoryError: CUDA out of memory\nsrun: error: a: task 0')": "out of memory: "
    "0: torch.OutOfMemoryError: CUDA out of memory",
    "import signal; signal.pause()": "no result after 0.5 s (autotuning.trial_limit)",
}


@pytest.fixture
def manager(config_file, tmp_path, monkeypatch):
    """Makes a `ResourceManager` whose jobs run `text` in place of the launcher."""

    def make(text, *, limit_s=60.0, session="s", reuses=lambda found: True, machines=()):
        made = ResourceManager(
            command("--deepspeed_config", config_file),
            results=tmp_path / "results",
            experiments=tmp_path / "exps",
            limit_s=limit_s,
            session=session,
            reuses=reuses,
            machines=machines,
        )
        made.job = lambda arguments: [sys.executable, "-I", "-S", "-c", text, *arguments]
        return made

    (tmp_path / "train.py").write_text("first")
    return make


def trial(manager, micro=1):
    config = {"train_micro_batch_size_per_gpu": micro}
    return manager.run_experiment("a_trial", {"micro": micro}, config, {"enabled": True}, {}, "metric_path")


def test_a_trial_leaves_what_it_was_and_what_it_came_to(manager, tmp_path):
    found = trial(manager(MEASURES))
    assert (found.metrics["throughput"], found.reason, found.is_reused) == (2.0, "", False)
    folder = tmp_path / "results" / "a_trial"
    assert read_result(folder / "exp.json") == found
    ran = json.loads((folder / "ds_config.json").read_text())
    assert ran["train_micro_batch_size_per_gpu"] == 1
    assert ran["autotuning"] == {"enabled": True, "metric_path": str(folder / "metrics.json")}
    assert (folder / "cmd.txt").read_text() == f"deepspeed -i a:0 train.py --deepspeed_config {folder}/ds_config.json\n"
    assert json.loads((tmp_path / "exps" / "a_trial.json").read_text())["settings"] == {"micro": 1}


@pytest.mark.parametrize("text", ENDS)
def test_a_trial_without_a_figure_is_a_result_with_its_reason(manager, text):
    found = trial(manager(text, limit_s=0.5 if "pause" in text else 60.0))
    assert (found.metrics, found.reason) == ({}, ENDS[text])


def test_an_equal_trial_is_not_made_twice(manager, tmp_path):
    first = trial(manager(MEASURES))
    fails = "raise SystemExit('not again')"
    again = trial(manager(fails))
    assert again.is_reused
    assert again.metrics == first.metrics
    assert "not again" in trial(manager(fails, reuses=lambda found: False)).reason
    trial(manager(MEASURES))
    assert "not again" in trial(manager(fails), micro=2).reason
    trial(manager(MEASURES))
    (tmp_path / "train.py").write_text("second")
    assert "not again" in trial(manager(fails)).reason
    trial(manager(MEASURES))
    assert "not again" in trial(manager(fails, machines=["fewer"])).reason


def test_an_error_is_not_kept_and_a_lack_of_memory_is(manager):
    assert "wrong" in trial(manager("raise SystemExit('wrong')")).reason
    assert trial(manager("raise MemoryError")).reason == "out of memory: MemoryError"
    assert trial(manager(MEASURES)).reason == "out of memory: MemoryError"


def test_a_former_figure_is_not_taken_for_one_of_a_trial_that_failed(manager):
    trial(manager(MEASURES))
    assert trial(manager("raise SystemExit('wrong')"), micro=2).metrics == {}


# ---- a search ---------------------------------------------------------------------------------------------------


def arguments_of(**others):
    known = {"num_gpus": None, "num_nodes": None, "include": "", "exclude": "", "autotuning": "run"}
    words = ["--deepspeed_config", "ds.json"]
    return argparse.Namespace(user_script="train.py", user_args=words, **{**known, **others})


@pytest.fixture
def searches(config_file, tmp_path):
    """Makes an `Autotuner` of a section."""

    def make(section=None, hosts=None, **flags):
        config = {"train_micro_batch_size_per_gpu": 1, "autotuning": {"enabled": True, **(section or {})}}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        return Autotuner(arguments_of(**flags), hosts)

    (tmp_path / "train.py").write_text("first")
    return make


def test_an_ignored_signal_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


HOSTS = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 1, 2, 3]}


def test_ranks_are_those_that_the_section_leaves(searches):
    assert searches(hosts=HOSTS)._count_ranks() == 12
    found = searches({"num_gpus": 2, "num_nodes": 2}, HOSTS)
    assert found.command.flags == ("--num_gpus", "2", "--num_nodes", "2")
    assert found._count_ranks() == 4


@pytest.mark.parametrize("flags", [{"include": "a:0"}, {"exclude": "a:1"}, {"num_gpus": 1, "num_nodes": 1}])
def test_flags_of_the_command_decide_alone(searches, flags):
    found = searches({"num_gpus": 4, "num_nodes": 2}, {"a": [0]}, **flags)
    assert found.command.flags == ()
    assert found._count_ranks() == 1


def test_trials_of_other_machines_differ(searches):
    machines = [
        searches(hosts=HOSTS).rm.machines,
        searches(hosts={**HOSTS, "c": [0, 1]}).rm.machines,
        searches(num_gpus=2).rm.machines,
        searches({"num_gpus": 4}).rm.machines,
    ]
    assert all(one != other for at, one in enumerate(machines) for other in machines[:at])


def test_the_job_that_follows_is_that_of_the_best(searches, monkeypatch):
    searches({"num_gpus": 4})

    def tune(autotuner):
        autotuner.optimal_arguments = ["--deepspeed_config", "best"]

    monkeypatch.setattr(Autotuner, "tune", tune)
    words = ["--num_gpus", "4", "train.py", "--deepspeed_config", "best"]
    assert tune_command(arguments_of(), {}) == words
    assert tune_command(arguments_of(autotuning="tune"), {}) is None


def test_no_operation_is_no_figure():
    empty = result(0, 1, 10.0)
    empty.metrics["FLOPS_per_gpu"] = 0.0
    assert score_of(empty, "flops") is None


def test_a_second_search_in_the_folder_is_refused(searches, tmp_path, monkeypatch):
    first, second = searches(), searches()

    def find_space(table):
        second.tune()

    monkeypatch.setattr(first, "_find_space", find_space)
    with pytest.raises(
        ConfigError, match=rf"autotuning\.results_dir: process \d+ on .* is searching in {tmp_path}/auto"
    ):
        first.tune()


@pytest.mark.parametrize(
    ("path", "found"), [("train.py/info.json", "cannot use train.py: "), (".", "cannot write .: it is a directory")]
)
def test_a_model_info_path_that_cannot_be_written_is_refused_before_any_job(searches, path, found):
    with pytest.raises(ConfigError, match=rf"autotuning\.model_info_path: {found}"):
        searches({"model_info_path": path}).tune()


@pytest.mark.parametrize("name", ["results_dir", "exps_dir"])
def test_a_folder_that_is_none_is_refused(searches, name):
    with pytest.raises(ConfigError, match=rf"autotuning\.{name}: cannot use .*/train\.py: "):
        searches({name: "train.py"}).tune()


@pytest.mark.parametrize("text", ["[1]", '{"session": "old"}', '{"session": 1, "finished": false}', "{"])
def test_a_state_that_says_nothing_is_left_aside_with_a_warning(searches, tmp_path, lines, text):
    (tmp_path / "autotuning_results").mkdir()
    (tmp_path / "autotuning_results" / "tuning.json").write_text(text)
    assert searches().rm.session != "old"
    assert any("tuning.json: is not the state of a search; it begins from nothing" in each for _, each in lines)


@pytest.mark.parametrize(("given", "found"), [(72, 72), (1.3e9, 1_300_000_000), (None, 0)])
def test_the_number_of_parameters_is_a_number(searches, given, found):
    assert searches({"model_info": {"num_params": given} if given else {}})._num_params == found


def test_a_word_is_no_number_of_parameters(searches):
    with pytest.raises(
        ConfigError, match=r"autotuning\.model_info\.num_params: asked for '1\.3B', allowed is an integer"
    ):
        searches({"model_info": {"num_params": "1.3B"}})


def test_an_error_says_nothing_about_larger_micro_batches(searches, monkeypatch):
    search = searches()
    ends = iter(["exit code 1: KeyError", "out of memory: MemoryError", "no result after 1 s"])

    def run(name, point, *others):
        return TrialResult(name=name, settings=point, fingerprint="f", session="s", reason=next(ends))

    monkeypatch.setattr(search.rm, "run_experiment", run)
    space = Space(search.user_config, search.autotuning_config, ModelInfo())
    measure = search._measure(space, LiveTable("throughput"))
    (point,) = space.coarse()
    assert math.isnan(measure(point))
    assert measure(point) is None
    assert measure(point) is None
