"""A rank fails in its backward while the others are in a collective of their own: no rank waits for another one. A rank
that is killed in the middle of training ends the job, which names the signal.

The timeout of the group is the default, 30 minutes; the tests end long before it. The ranks are processes of the test,
not of the pool: they close connections.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from deepspeed.testing.tiers import swept

TRAIN = """
import itertools, os, sys
import deepspeed, torch
import deepspeed.comm as dist
from deepspeed.zero.bucket import BucketState

rank, stage, case = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]

class Boom(RuntimeError):
    pass

class During(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, during):
        ctx.during = during
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.during()
        return grad, None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, place=-1, during=None):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = During.apply(x, during) if number == place else x
        return x.square().mean()

def boom():
    launched = (BucketState.REDUCING, BucketState.REDUCED)  # a quick peer may have finished one already
    say("launched", sum(bucket.state in launched for bucket in engine.sharding.gradients.memory.buckets))
    if case == "stays alive":  # with nothing in flight: peers wait for what would have followed
        [bucket.finish() for bucket in engine.sharding.gradients.memory.buckets]
    raise Boom("the batch is bad")

def boom_at_third(call):
    calls = itertools.count()
    return lambda *args, **keys: boom() if next(calls) == 2 else call(*args, **keys)

def own_collective():
    dist.all_reduce(torch.ones(1))

def say(*words):
    print(*words, flush=True)

def train_step(*bad):
    engine.backward(engine(torch.full((1, 32), rank + 1.0), *bad))
    engine.step()

torch.manual_seed(0)
net = Net()
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": stage, "reduce_bucket_size": 1100},
}
if stage == 3:  # each rank has a copy of the model, and gradients are summed over the copies once per step
    config["zero_optimization"] |= {"mics_shard_size": 1, "stage3_param_persistence_threshold": 0}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
train_step()
try:
    if case == "own collective":
        train_step(1, boom if rank == 1 else own_collective)
    elif case == "stays alive":
        train_step(*(1, boom) if rank == 1 else ())
    elif case == "sum over copies":  # rank 1 has issued its part of two sums, and fails in the third
        copies = engine.sharding.units.ranks.dense.replicate_group
        if rank == 1:
            copies.all_reduce = boom_at_third(copies.all_reduce)
        train_step()
    elif case == "outside":  # with collectives in flight, between backward and step
        engine.backward(engine(torch.ones(1, 32)))
        boom() if rank == 1 else own_collective()
    elif case == "caught":  # by all, at places that differ; nothing is launched at place 3
        places = [1, 0] if sys.argv[3] == "late" else [3, 3]
        train_step(places[rank], boom)
except Boom:
    if case in ("stays alive", "sum over copies"):
        sys.stdin.read()
    if case != "caught":
        raise
finally:
    if case not in ("caught", "none"):
        engine.destroy()
        dist.destroy_process_group()
train_step()
say("weights", sum(float(param.double().sum()) for param in net.parameters()))
"""


@pytest.fixture
def start(start_ranks, path):
    """`start(stage, case, *words)`: two ranks of `TRAIN`."""
    return functools.partial(start_ranks, TRAIN, DS_COMM_DIRECT="1" if path == "direct" else "0")


def after(words, output):
    """What a rank said after these words."""
    return next(line.removeprefix(words) for line in output.splitlines() if line.startswith(words))


#: each case starts processes, so a transport is tried with one stage
STAGE = {"direct": 0, "messages": 2}


@pytest.mark.parametrize("case", ["own collective", "outside"])
def test_an_exception_is_not_withheld(start, path, case):
    peer, failed = start(1 if case == "outside" else STAGE[path], case)
    code, output = failed.end()
    assert code == 1, output
    assert float(after("launched", output)) > 0
    assert "Boom: the batch is bad" in output
    code, output = peer.end()
    assert code == 1, output
    assert "rank 1 failed with Boom: the batch is bad" in output


def test_a_failed_rank_that_lives_lets_its_peers_go(start, path):
    check_peer_goes(*start(STAGE[path], "stays alive"))


@pytest.mark.parametrize("path", ["messages"], indirect=True)  # there a rank leaves each group by itself
@pytest.mark.parametrize("case", ["stays alive", "sum over copies"])
def test_peers_in_other_groups_of_the_engine_are_let_go_too(start, path, case):
    check_peer_goes(*start(3, case))


def check_peer_goes(peer, failed):
    code, output = peer.end()
    assert code == 1, output
    assert "rank 1 failed with Boom: the batch is bad" in output
    assert re.search(r"rank 0 cannot finish a[^:]*: rank 1 failed", output) or "PeerLeft: rank 1 left" in output
    assert failed.poll() is None
    assert "Boom: the batch is bad" in failed.end()[1]


@pytest.mark.parametrize("launched", ["early", "late"])
def test_a_failure_that_all_ranks_catch(start, path, launched):
    """They go on as if the batch had not been."""
    outputs = [rank.end()[1] for rank in start(1, "caught", launched)]
    assert [float(after("launched", output)) > 0 for output in outputs] == [launched == "late"] * 2
    expected = [rank.end()[1] for rank in start(1, "none")]
    assert len({after("weights", output) for output in outputs + expected}) == 1


# ---- a rank that is killed -------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()"]
LIMIT_S = 120
#: the promise is 10 s; a machine that also runs other tests gets more
END_S = 30

ENDLESS = """
import os, sys
import deepspeed, torch
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": int(os.environ["DS_TEST_STAGE"])},
    "steps_per_print": float("inf"),
}
engine, *_ = deepspeed.initialize(model=net, config=config)
while True:
    engine.backward(engine(torch.randn(4, 64)).square().mean())
    engine.step()
    if engine.global_steps == 5:
        os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
"""


@pytest.mark.parametrize("stage", swept([0, 2], lambda stage: stage == 2))
def test_a_rank_killed_in_training_ends_the_job(tmp_path, monkeypatch, stage):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_TEST_STAGE", str(stage))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(ENDLESS)
    with subprocess.Popen(
        [*COMMAND, "--num_accelerators", "2", "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        pid_of = {}
        while len(pid_of) < 2:
            line = job.stdout.readline()
            assert line, job.stderr.read()
            if line.startswith("ready"):
                _, rank, pid = line.split()
                pid_of[int(rank)] = int(pid)
        killed = time.monotonic()
        os.kill(pid_of[1], signal.SIGKILL)
        _, stderr = job.communicate(timeout=LIMIT_S)
        took_s = time.monotonic() - killed
    assert job.returncode == 128 + signal.SIGKILL
    assert f"rank 1 (pid {pid_of[1]}) was killed by SIGKILL" in stderr.rstrip().splitlines()[-1]
    assert took_s < END_S
