"""`checkpoint.on_sigterm`: all ranks save after the same step and exit, whichever of them got the signal.

Real processes and signals; no test sleeps.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept

LIMIT_S = 240
COMMAND = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()"]

# Trains on what a process of the data loader makes, until it is told to end, or for `sys.argv[-1]` steps.
TRAIN = """
import json, os, sys
import deepspeed, torch
count = int(sys.argv[-1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
config = {
    "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "gradient_clipping": 0,
    "zero_optimization": {"stage": 2}, "checkpoint": {"on_sigterm": True, "async_save": True},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
_, client_state = engine.load_checkpoint("saved")
assert not client_state or client_state["step"] == engine.global_steps
engine.sigterm_client_state = lambda: {"step": engine.global_steps}
class Steps(torch.utils.data.IterableDataset):
    def __iter__(self):
        step, rank = first, engine.global_rank
        while True:
            yield torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[4 * rank:4 * rank + 4]
            step += 1
first = engine.global_steps
out = open(f"{os.getpid()}.jsonl", "w")
loader = torch.utils.data.DataLoader(Steps(), None, num_workers=1)
for step, x in zip(range(first, first + count), loader, strict=False):
    loss = (engine(x) - 1).square().mean()
    engine.backward(loss)
    out.write(json.dumps([step, engine.global_rank, loss.item()]) + "\\n")
    out.flush()
    if step == first + 2 and count > 9:
        os.write(1, b"ready\\n")
    engine.step()
os.write(1, f"ends {engine.global_steps}\\n".encode())
engine.destroy()
"""


def unbroken_losses(num_steps):
    """Of each step, by plain torch on whole batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_job_that_is_told_to_end_saves_and_goes_on_later(folder, start_ranks):
    (folder / "train.py").write_text(TRAIN)
    job = subprocess.Popen(
        [*COMMAND, "--num_gpus", "2", "train.py", "1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        told = (line for line in job.stdout if line == "ready\n")  # gloo of older torches prints, too
        assert [next(told, "ended") for _ in range(2)] == ["ready\n"] * 2
        job.terminate()
        _, errors = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM, errors
    saved = int((folder / "saved" / "latest").read_text().removeprefix("global_step"))
    assert f"SIGTERM: saved in saved after step {saved}" in errors
    assert "Traceback" not in errors
    for rank in start_ranks(TRAIN, "2"):
        code, output = rank.end()
        assert code == 0, output
        assert f"ends {saved + 2}\n" in output
    records = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert sorted((step, rank) for step, rank, _ in records) == [(s, r) for s in range(saved + 2) for r in range(2)]
    found = [sum(loss for each, _, loss in records if each == step) / 2 for step in range(saved + 2)]
    assert found == pytest.approx(unbroken_losses(saved + 2), rel=1e-5)


def test_ranks_that_do_not_end_are_killed_after_the_grace_period(folder):
    Path("train.py").write_text(
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.write(1, b'ready\\n')\n"
        "while True: signal.pause()\n"
    )
    job = subprocess.Popen([*COMMAND, "--num_gpus", "2", "--grace_period", "0", "train.py"], stdout=subprocess.PIPE)
    assert [job.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    job.terminate()
    assert job.communicate(timeout=LIMIT_S) == (b"", None)
    assert job.returncode == 128 + signal.SIGTERM


def told_at(told, steps, folder):
    """Train; the ranks `told` get SIGTERM in their third step of two micro-batches. The step at which each ended."""
    former = signal.getsignal(signal.SIGTERM)
    torch.manual_seed(0)
    keys = {"gradient_accumulation_steps": 2, "checkpoint": {"on_sigterm": True}}
    engine = make_engine(torch.nn.Linear(4, 1), 1, **keys)
    rank = torch.distributed.get_rank()
    if folder is not None:
        engine.load_checkpoint(folder)
    try:
        for micro in range(2 * steps):
            if micro == 4 and rank in told:
                os.kill(os.getpid(), signal.SIGTERM)
            engine.backward(engine(torch.full((2, 4), rank + 1.0)).square().mean())
            engine.step()
    except SystemExit as end:
        ended = engine.global_steps, end.code
    else:
        ended = engine.global_steps, None
    engine.destroy()
    return (*ended, signal.getsignal(signal.SIGTERM) == former)


@pytest.mark.parametrize("told", swept([{0}, {1}, {0, 1, 2}], lambda told: told == {1}))
def test_one_rank_that_is_told_tells_the_others(tmp_path, told):
    assert run_ranks(3, told_at, told, 9, str(tmp_path)) == [(4, 143, True)] * 3
    assert (tmp_path / "latest").read_text() == "global_step4"


def test_a_rank_alone_ends_after_the_step_that_it_is_in(tmp_path):
    assert run_ranks(1, told_at, {0}, 9, str(tmp_path)) == [(3, 143, True)]
    assert (tmp_path / "latest").read_text() == "global_step3"


def test_without_a_directory_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, told_at, {0}, 9, None) == [(3, 143, True)]
    assert run_ranks(1, told_at, set(), 3, None) == [(3, None, True)]
    assert not list(tmp_path.iterdir())
