"""A rank fails in its backward while the others are in a collective of their own: no rank waits for another one.

The timeout of the group is the default, 30 minutes; the tests end long before it. The ranks are processes of the test,
not of the pool: they close connections.
"""

import os
import re
import socket
import subprocess
import sys

import pytest

#: far below the timeout of the group, far above what a loaded machine needs
LIMIT_S = 100

TRAIN = """
import os, sys
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
    say("launched", sum(bucket.state in launched for bucket in engine.sharding.buckets))
    if case == "stays alive":  # with nothing in flight: peers wait for what would have followed
        [bucket.finish() for bucket in engine.sharding.buckets]
    raise Boom("the batch is bad")

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
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
train_step()
try:
    if case == "own collective":
        train_step(1, boom if rank == 1 else own_collective)
    elif case == "stays alive":
        train_step(*(1, boom) if rank == 1 else ())
    elif case == "outside":  # with collectives in flight, between backward and step
        engine.backward(engine(torch.ones(1, 32)))
        boom() if rank == 1 else own_collective()
    elif case == "caught":  # by all, at places that differ; nothing is launched at place 3
        places = [1, 0] if sys.argv[3] == "late" else [3, 3]
        train_step(places[rank], boom)
except Boom:
    if case == "stays alive":
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
def start(tmp_path, path):
    """Start two ranks of `TRAIN`."""
    (tmp_path / "train.py").write_text(TRAIN)
    started = []

    def run(*args):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "TORCHELASTIC_"))}
        for rank in range(2):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
            env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            env["DS_COMM_DIRECT"] = "1" if path == "direct" else "0"
            command = [sys.executable, str(tmp_path / "train.py"), *map(str, args)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, env={**clean, **env}, text=True, **pipes))
        return started

    yield run
    for process in started:
        process.kill()
        process.communicate()


def after(words, output):
    """What a rank said after these words."""
    return next(line.removeprefix(words) for line in output.splitlines() if line.startswith(words))


#: each case starts processes, so a transport is tried with one stage
STAGE = {"direct": 0, "messages": 2}


@pytest.mark.parametrize("case", ["own collective", "outside"])
def test_an_exception_is_not_withheld(start, path, case):
    peer, failed = start(1 if case == "outside" else STAGE[path], case)
    output, _ = failed.communicate(timeout=LIMIT_S)
    assert failed.returncode == 1, output
    assert float(after("launched", output)) > 0
    assert "Boom: the batch is bad" in output
    output, _ = peer.communicate(timeout=LIMIT_S)
    assert peer.returncode == 1, output
    assert "rank 1 failed with Boom: the batch is bad" in output


def test_a_failed_rank_that_lives_lets_its_peers_go(start, path):
    peer, failed = start(STAGE[path], "stays alive")
    output, _ = peer.communicate(timeout=LIMIT_S)
    assert peer.returncode == 1, output
    assert "rank 1 failed with Boom: the batch is bad" in output
    assert re.search(r"rank 0 cannot finish a[^:]*: rank 1 failed", output) or "PeerLeft: rank 1 left" in output
    assert failed.poll() is None
    output, _ = failed.communicate("", timeout=LIMIT_S)
    assert "Boom: the batch is bad" in output


@pytest.mark.parametrize("launched", ["early", "late"])
def test_a_failure_that_all_ranks_catch(start, path, launched):
    """They go on as if the batch had not been; by messages they cannot know whether that is safe, if any was sent."""
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in start(1, "caught", launched)]
    assert [float(after("launched", output)) > 0 for output in outputs] == [launched == "late"] * 2
    if launched == "late" and path == "messages":
        assert all("left collectives of this group unfinished after a failure" in output for output in outputs)
        return
    expected = [process.communicate(timeout=LIMIT_S)[0] for process in start(1, "none")[2:]]
    assert len({after("weights", output) for output in outputs + expected}) == 1
