"""`ds_verify` on scripts, as a user calls it: what it prints, writes, and answers by its exit code."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed.cli.verify import DIFFERS, EQUAL, OTHER_DATA, WRONG, main, summary
from deepspeed.testing.tiers import swept
from deepspeed.verify.recording import Arithmetic, hooks_of
from deepspeed.verify.verdict import Bounds, Finding, RunVerdict, read_verdict

SCRIPT = """
import argparse
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--how", default="well")
how = parser.parse_args().how

if how == "wrongly":  # at stage 0 the gradient of a bias is halved after it was reduced
    from deepspeed.engine.training import Training

    step = Training.step
    def halved(self, *arguments):
        if self.sharding.stage == 0:
            self.sharding._module[2].bias.grad.mul_(0.5)
        step(self, *arguments)
    Training.step = halved
torch.manual_seed(torch.seed() if how == "unseeded" else 0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
data = [torch.randn(2, 8) for _ in range(20)]
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 0 if how == "wrongly" else 2},
}
if how == "nothing":
    raise SystemExit(0)
if how == "falls back":
    refused = {**config, "optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 3}}
    try:
        deepspeed.initialize(model=model, config=refused)
    except deepspeed.errors.ConfigError:
        pass
optimizer = None
if how == "brings":
    class Descent(torch.optim.SGD):
        pass

    del config["optimizer"]
    config["zero_allow_untested_optimizer"] = True
    optimizer = Descent(model.parameters(), lr=0.1)
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
if how == "brings":
    engine.module[0].bias.register_hook(lambda gradient: 3 * gradient)
    engine.module[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    engine.module[2].register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],))
engine.load_checkpoint("checkpoints", tag="last" if how == "loads" else None)  # which is there after a first run
is_plain = type(engine).__name__ == "PlainEngine"
for number, batch in enumerate(data[: 2 if how == "short" else None]):
    if how == "ends early" and is_plain and number == 1:
        break
    engine.backward(engine(batch * (1 + engine.global_rank)).square().mean())
    try:
        engine.step()
    except BaseException:
        if how != "catches":
            raise
    engine.save_checkpoint("checkpoints")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_healthy_script_is_equal_and_leaves_no_checkpoint(script, warm, capfd):
    command = ["--steps", "3", "--json", "verdict.json", "--plot", "verdict.svg", "--keep", "kept", str(script)]
    assert main(command) == EQUAL
    assert "Equal to plain torch" in capfd.readouterr().out
    verdict = json.loads(Path("verdict.json").read_text())
    assert (verdict["verdict"], verdict["steps"], verdict["faults"]) == ("equal", 3, [])
    assert {"forward weight", "loss", "learning rate", "gradient", "norm", "weight"} <= set(verdict["worst"])
    run = verdict["run"]
    assert run["sha256"] == hashlib.sha256(script.read_bytes()).hexdigest()
    assert (run["ranks"], run["arguments"], run["versions"]["torch"]) == (2, [], torch.__version__)
    assert [each["config"]["optimizer"]["type"] for each in run["engines"]] == ["AdamW"]
    assert Path("verdict.svg").read_text().startswith("<?xml")
    assert (Path("kept") / "engine0" / "step3" / "rank0.safetensors").exists()
    assert not Path("checkpoints").exists()
    assert main(["--keep", "kept", str(script)]) == WRONG
    assert "name a new folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "code", "said"),
    swept(
        [
            ("wrongly", DIFFERS, "first in step 1: gradient, 2.bias"),
            ("unseeded", OTHER_DATA, "Not comparable, first in step 1: inputs of forward 1"),
            ("loads", WRONG, "the script loads a checkpoint (checkpoints)"),
            ("nothing", WRONG, "made no step of an engine that trains"),
            ("short", EQUAL, "in 2 steps (3 were asked for"),
            ("falls back", EQUAL, "in 3 steps"),
            ("catches", EQUAL, "in 3 steps"),
            ("ends early", OTHER_DATA, "engine0 made no such step in plain torch"),
        ],
        lambda how, code, said: how == "wrongly",
    ),
)
def test_what_it_says_of_a_script(script, warm, how, code, said, capfd):
    assert main(["--steps", "3", str(script), "--how", how]) == code
    captured = capfd.readouterr()
    assert said in captured.out + captured.err


@pytest.mark.sweep
def test_the_broken_example_is_found(warm, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    example = Path(__file__).parents[3] / "examples" / "broken_decay.py"
    assert main(["--steps", "2", str(example)]) == DIFFERS
    assert "first in step 2: weight, 2.weight" in capfd.readouterr().out


OTHER = {
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3},
}


@pytest.mark.parametrize(
    ("how", "code", "said"),
    swept(
        [
            ("wrongly", DIFFERS, "Differs from other.json, first in step 1: gradient, 2.bias"),
            ("well", EQUAL, "Equal to other.json: "),
            ("falls back", EQUAL, "Equal to other.json: "),
            ("ends early", EQUAL, "Equal to other.json: "),  # with plain torch alone
        ],
        lambda how, code, said: how == "wrongly",
    ),
)
def test_a_script_is_compared_with_another_configuration(script, warm, how, code, said, capfd):
    Path("other.json").write_text(json.dumps(OTHER))
    command = ["--steps", "2", "--against", "other.json", "--json", "verdict.json", str(script), "--how", how]
    assert main(command) == code
    assert said in capfd.readouterr().out
    assert json.loads(Path("verdict.json").read_text())["against"] == "other.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--against: found no file other.json"),
        ("{'stage'", "the file 'other.json' is neither JSON nor hjson"),
        ('{"zero_optimisation": {"stage": 0}}', "other.json: zero_optimisation: "),
        ('{"zero_optimization": {"stages": 0}}', "other.json: zero_optimization.stages: "),
    ],
)
def test_another_configuration_that_is_wrong_is_named_before_anything_runs(text, said, script, capfd):
    if text is not None:
        Path("other.json").write_text(text)
    assert main(["--against", "other.json", str(script)]) == WRONG
    assert said in capfd.readouterr().err


def test_what_cannot_be_asked_is_said_before_anything_runs(script, capfd):
    assert main(["nowhere.py"]) == WRONG
    assert "nowhere.py: there is no such file" in capfd.readouterr().err
    assert main(["--plot", "verdict.foo", str(script)]) == WRONG
    assert "give a file that ends with .svg, .png, .pdf" in capfd.readouterr().err
    assert main(["--json", "no/folder/verdict.json", str(script)]) == WRONG
    assert "there is no folder" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["--ranks", "0", str(script)])
    assert "give a number from 1 on" in capfd.readouterr().err


def row(step, kind, name, difference, bound=1.0):
    return Finding(step, kind, name, difference, bound, 1.0, 0)


def test_the_first_fault_is_the_one_nearest_to_the_cause():
    rows = [row(1, "gradient", "first", 0.5), row(1, "gradient", "last", 0.5), row(1, "weight", "first", 2.0)]
    rows += [row(2, "norm", "whole gradient", 3.0), row(2, "gradient", "first", 2.0), row(2, "gradient", "last", 2.0)]
    rows += [row(3, "loss", "backward 1", float("nan"))]
    verdict = RunVerdict(rows, {})
    found = [(each.step, each.kind, each.name) for each in verdict.faults]
    assert found == [
        (1, "weight", "first"),
        (2, "gradient", "last"),
        (2, "gradient", "first"),
        (2, "norm", "whole gradient"),
        (3, "loss", "backward 1"),
    ]
    assert summary(verdict, asked=3)[0] == "Differs from plain torch, first in step 1: weight, first, rank 0."
    of_one = summary(RunVerdict(rows[:2], {}), asked=3)[0]
    assert of_one.startswith("Equal to plain torch: 2 comparisons in 1 step (3 were asked for")


def verdict_of(folder, *rows):
    """The verdict on a run of one step, with these comparisons."""
    for step, each in enumerate(([], rows)):
        path = folder / "engine0" / f"step{step}"
        path.mkdir(parents=True)
        (path / "rows0.json").write_text(json.dumps([asdict(row) for row in each]))
    return read_verdict(folder)


def test_what_says_nothing_is_said(tmp_path):
    weight = row(1, "weight", "first", 0.0, bound=2.0)
    skipped = verdict_of(tmp_path / "skipped", weight)
    assert "every step was skipped" in skipped.first.name
    assert not skipped.is_comparable
    assert skipped.notes == []
    small = verdict_of(tmp_path / "small", weight, row(1, "gradient", "first", 0.0))
    assert small.notes[0].startswith("1 of 1 updates are smaller than the rounding of their weights")


def test_what_of_the_script_both_runs_ran_is_said(script, warm, capfd):
    assert main(["--steps", "1", "--json", "verdict.json", str(script), "--how", "brings"]) == EQUAL
    said = " ".join(capfd.readouterr().out.split())  # wrapped by the width of the console
    names = "0.weight, 0.bias, forward of 1 and 1 more"
    assert f"Note: hooks of the script ran in both runs, and what they do is not judged: {names}" in said
    (engine,) = json.loads(Path("verdict.json").read_text())["run"]["engines"]
    assert engine["hooks"][-1] == "backward of 2"  # those of the last three after `initialize`
    assert "Note: the script's optimizer Descent ran in both runs, and was compared with itself" in said


def test_hooks_of_libraries_are_not_the_scripts():
    def of_library(module, inputs, output):
        return output

    model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)), torch.nn.Tanh())
    of_library.__module__ = "transformers.modeling_utils"
    model[0].register_forward_hook(partial(of_library))
    assert hooks_of(model) == []
    model.register_full_backward_hook(lambda module, inner, outer: None)
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    assert hooks_of(model) == ["backward of the model", "forward of 1"]


def test_many_hooks_are_counted(tmp_path):
    (tmp_path / "engine0").mkdir()
    (tmp_path / "engine0" / "setting.json").write_text(json.dumps({"hooks": [str(each) for each in range(9)]}))
    assert read_verdict(tmp_path).notes[-1].endswith("is not judged: 0, 1, 2 and 6 more")


def test_bounds_follow_from_the_arithmetic():
    def bounds(**changed):
        usual = {"num_ranks": 2, "num_micros": 1, "model": "float32", "sums": "float32", "masters": "float32"}
        arithmetic = Arithmetic(**{**usual, "clip": 0.0, "other_kernels": False, **changed})
        return Bounds(arithmetic, {"weight": 100})

    fp32, bf16 = bounds(), bounds(model="bfloat16", sums="bfloat16")
    assert fp32.gradient("weight", length=1.0, norm=1.0) == pytest.approx((2**-18) * 5 + 6 * 2**-24)
    assert bf16.gradient("weight", length=1.0, norm=1.0) == pytest.approx((2**-12) * 5 + 6 * 2**-8)
    assert fp32.loss(2.0) == 2 * 2**-18
    assert bounds(other_kernels=True).slack == 16 * 2**-24
    element = fp32.element(torch.tensor(1.0), torch.tensor(1.0), 1.0)
    assert element.item() == pytest.approx(2**-22 + 2**-6 + 2**-10)
    assert fp32.weight(size=1.0, update=1.0) == pytest.approx(2**-23 + 2**-12)


@pytest.mark.parametrize("number", swept([signal.SIGINT, signal.SIGTERM], lambda number: number == signal.SIGTERM))
def test_a_command_that_is_told_to_end_leaves_no_process(number, script):
    script.write_text("import os, signal\nopen('started', 'w').write(f'{os.getpid()}\\n')\nsignal.pause()\n")
    os.mkfifo("started")
    command = [sys.executable, "-m", "deepspeed.cli.verify", "--no_local_rank", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = []
    try:
        while len(started) < 2:
            with open("started") as pipe:  # waits for a rank
                started += pipe.read().split()
        process.send_signal(number)
        assert process.wait(60) != EQUAL
    finally:
        process.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
