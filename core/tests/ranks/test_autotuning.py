"""`deepspeed --autotuning` as a user calls it: jobs of real ranks, a kill in the middle, a trial without memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.testing.tiers import swept

LIMIT_S = 250
COMMAND = ["-c", "from deepspeed.launcher.runner import main; main()"]
DEMO = Path(__file__).parents[3] / "examples" / "train_gpt.py"

#: A micro-batch of 4 has no memory. A trial of a micro-batch of 2 says in the pipe `held` that it runs, and stays.
SCRIPT = """
import argparse, os, signal
import deepspeed, torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--batch", type=int)
arguments = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(arguments, model=model)
micro = engine.train_micro_batch_size_per_gpu()
assert arguments.batch == micro
if micro == 4:
    raise torch.OutOfMemoryError("tried to allocate 80 GiB")
if micro == 2 and os.path.exists("held"):
    pipe = open("held", "w")
    pipe.write("held\\n")
    pipe.flush()
    signal.pause()
for _ in range(100):
    engine.backward(engine(torch.randn(micro, 8)).pow(2).mean())
    engine.step()
assert not engine.autotuning_enabled(), "a trial ends before this"
print("trained with", micro)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": [4, 2],
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam"},
    "autotuning": {
        "enabled": True,
        "start_profile_step": 2,
        "end_profile_step": 3,
        "model_info": {"num_params": 72},
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    },
}


def _listen_to_ctrl_c():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run under nohup


def start(*words):
    """A search on two ranks."""
    return subprocess.Popen(
        [sys.executable, *COMMAND, "--autotuning", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_listen_to_ctrl_c,  # noqa: PLW1509 - no thread runs here
    )


def tune(*words):
    """Output and results of a search that comes to its end."""
    process = start(*words)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return output, json.loads(Path("autotuning_results/tuning.json").read_text())


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("number", swept([signal.SIGKILL, signal.SIGINT], lambda number: number == signal.SIGKILL))
def test_a_search_that_is_ended_in_the_middle_leaves_nobody_and_goes_on(folder, warm, number):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    words = ["tune", "--num_gpus", "2", "train.py", "--deepspeed_config", "ds.json", "--batch", "2"]
    os.mkfifo("held")
    first = start(*words)
    with open("held") as pipe:
        assert pipe.readline() == "held\n"
        first.send_signal(number)
        _, errors = first.communicate(timeout=LIMIT_S)
        pipe.read()  # to its end, which comes when no rank is left
    assert first.returncode == (-number if number == signal.SIGKILL else 128 + number), errors
    os.unlink("held")
    former = json.loads(Path("autotuning_results/tuning.json").read_text())
    assert not former["finished"]
    assert [trial["name"] for trial in former["trials"]] == ["z1_tmbspg4_gas1"]

    goal = "run" if number == signal.SIGINT else "tune"
    output, state = tune(goal, *words[1:])
    assert state["finished"]
    assert state["session"] == former["session"]
    four, two = state["trials"]
    assert four == {**former["trials"][0], "is_reused": True}
    assert four["metrics"] == {}
    assert four["reason"].startswith("out of memory: ")
    assert "tried to allocate 80 GiB" in four["reason"]
    assert not two["is_reused"]
    metrics = two["metrics"]
    assert (metrics["steps"], metrics["train_batch_size"]) == (2, 4)
    assert metrics["throughput"] == pytest.approx(4 / metrics["latency"] * 1e3)
    best = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    others = {name: value for name, value in CONFIG.items() if name != "autotuning"}
    assert best == {**others, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert "best: z1_tmbspg2_gas1, throughput" in output
    assert "z1_tmbspg4_gas1" in output
    assert output.count("trained with 2") == (2 if goal == "run" else 0)


SWEEP = {"stage": [0, 1, 2, 3], "micro": [1, 2, 4, 8, 16, 32]}


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_the_demo_is_tuned_in_a_third_of_the_trials_of_a_sweep(folder):
    """A model-based search chooses among the figures of the sweep: results of equal trials stand for new ones."""
    config = json.loads((DEMO.parent / "ds_config.json").read_text())
    config["zero_optimization"]["stage"] = SWEEP["stage"]
    config["train_micro_batch_size_per_gpu"] = SWEEP["micro"]
    steps = {"start_profile_step": 3, "end_profile_step": 6, "overwrite": False}
    words = ["tune", "--num_gpus", "2", str(DEMO), "--text-megabytes", "1", "--deepspeed_config", "ds.json"]

    def search(**section):
        config["autotuning"] = {"enabled": True, **steps, **section}
        (folder / "ds.json").write_text(json.dumps(config))
        process = start(*words)
        _, errors = process.communicate(timeout=3600)
        assert process.returncode == 0, errors
        return json.loads(Path("autotuning_results/tuning.json").read_text())["trials"]

    sweep = search(tuner_early_stopping=0, tuner_num_trials=100)
    assert len(sweep) == 24
    figures = {trial["name"]: trial["metrics"]["throughput"] for trial in sweep}
    found = search(tuner_type="model_based", tuner_num_trials=len(sweep) // 3)
    assert all(trial["is_reused"] for trial in found)
    assert len(found) <= len(sweep) // 3
    assert max(trial["metrics"]["throughput"] for trial in found) >= max(figures.values()) / 1.05
