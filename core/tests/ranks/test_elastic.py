"""A job that loses ranks and hosts, and takes hosts in: `deepspeed --elastic_training`, with real kills.

Hosts are this machine, by the stand-in for ssh of conftest.py. No test sleeps: what a rank waits for is what the test
is about, or a fifo; end of file on the output says that every process that held it is gone.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.launcher.launch import find_free_port
from deepspeed.testing.forked import wait_for_end
from deepspeed.testing.tiers import swept

LIMIT_S = 240
COMMAND = ["-c", "from deepspeed.launcher.runner import main; main()"]
STEPS, BATCH = 8, 8

# Trains on 64 samples, each once; saves after each step without waiting for the disk. What it saw of a step and its
# loss stand in a file of the process. `trouble(step)` is of the test.
TRAIN = f"""
import json, os, signal, sys
import deepspeed, torch
from pathlib import Path
TROUBLE
round_number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first_round = round_number == 0
torch.manual_seed(0)
x, y = torch.randn({STEPS * BATCH}, 4), torch.randn({STEPS * BATCH}, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
config = {{
    "optimizer": {{"type": "Adam", "params": {{"lr": 0.01}}}}, "zero_optimization": {{"stage": 1}},
    "gradient_clipping": 0.0, "checkpoint": {{"async_save": True}}, **json.loads(sys.argv[-1]),
}}
data = torch.utils.data.TensorDataset(x, y, torch.arange({STEPS * BATCH}))
engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
assert engine.train_batch_size() == {BATCH}
engine.load_checkpoint("saved")
loader.resume(engine.global_samples)
batches = iter(loader)
out = open(f"{{os.getpid()}}.jsonl", "a")
while engine.global_steps < {STEPS}:
    step, ids, losses = engine.global_steps, [], []
    trouble(step)
    for _ in range(engine.gradient_accumulation_steps()):
        x, y, number = next(batches)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        ids += number.tolist()
        losses.append(loss.item())
        if engine.is_gradient_accumulation_boundary():  # before the step, which may be the last
            record = {{"round": round_number, "world": torch.distributed.get_world_size(), "step": step}}
            out.write(json.dumps({{**record, "ids": ids, "losses": losses}}) + "\\n")
            out.flush()
        engine.step()
    engine.save_checkpoint("saved")
engine.destroy()
"""
FIXED = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2}
ELASTIC = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": BATCH,
        "micro_batch_sizes": [2],
        "max_gpus": 4,
        "version": 0.1,
    }
}


def write_script(trouble):
    Path("train.py").write_text(TRAIN.replace("TROUBLE", trouble))


def start(*words, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, *COMMAND, "--elastic_training", *words], **pipes)


def unbroken_losses():
    """Of each step, by plain torch on whole batches; the order is that of the sampler for one rank."""
    torch.manual_seed(0)
    x, y = torch.randn(STEPS * BATCH, 4), torch.randn(STEPS * BATCH, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(range(STEPS * BATCH), num_replicas=1, rank=0, seed=0)
    losses = []
    for batch in torch.tensor(list(sampler)).split(BATCH):
        loss = (model(x[batch]) - y[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_training():
    """The losses are those of an unbroken run, and each sample counts once; the number of ranks of each round."""
    records = [json.loads(line) for file in Path().glob("*.jsonl") for line in file.read_text().splitlines()]
    found, seen = [], []
    for step in range(STEPS):
        of_step = [record for record in records if record["step"] == step]
        last = max(record["round"] for record in of_step)
        counted = [record for record in of_step if record["round"] == last]  # earlier ones were lost with a host
        assert len(counted) == counted[0]["world"]
        losses = [loss for record in counted for loss in record["losses"]]
        found.append(sum(losses) / len(losses))
        seen += [number for record in counted for number in record["ids"]]
    assert found == pytest.approx(unbroken_losses(), rel=1e-5)
    assert sorted(seen) == list(range(STEPS * BATCH))
    return {record["round"]: record["world"] for record in records}


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
    return True


KILL_A_HOST = """
def trouble(step):
    if first_round and step == 3 and os.environ["SSH_HOST"] == "{host}":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    if step == 5 and not first_round and os.environ["WORLD_SIZE"] == "1":
        os.write(1, b"alone\\n")
        signal.pause()
"""


@pytest.mark.parametrize("host", swept(["127.0.0.1", "127.0.0.2"], lambda host: host == "127.0.0.1"))
def test_a_host_is_killed_and_another_comes_later(hosts, warm, host):
    (hosts / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    write_script(KILL_A_HOST.format(host=host))
    port = find_free_port()
    where = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    limits = ["--min_elastic_nodes", "1", "--max_elastic_nodes", "2", "--max_restarts", "0"]
    job = start("-H", "hosts", *where, *limits, "train.py", json.dumps(ELASTIC))
    # torch 2.10's gloo prints lines of its own; without ours the output ends
    assert any(line.endswith("alone\n") for line in job.stdout), job.communicate()
    late = start("--no_ssh", *where, "--node_rank", "7", "--num_gpus", "1", "train.py", json.dumps(ELASTIC))
    _, errors = job.communicate(timeout=LIMIT_S)
    late_errors = late.communicate(timeout=LIMIT_S)[1]
    assert (job.returncode, late.returncode) == (0, 0), errors + late_errors
    assert "is lost; the ranks of 1 other node form again" in errors
    assert "has come; the ranks form again with it" in errors
    assert check_training() == {0: 2, 1: 1, 2: 2}
    assert is_free(port)


KILL_A_RANK = """
def trouble(step):
    print("step", step, "of round", round_number, flush=True)
    if first_round and step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_is_killed_and_the_job_goes_on(folder, warm):
    write_script(KILL_A_RANK)
    job = start("--num_gpus", "2", "--enable_each_rank_log", "logs", "train.py", json.dumps(FIXED))
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, errors
    assert "2 ranks on 1 node go on; restart 1 of 3\n" in errors
    assert "was killed by SIGKILL; the other ranks were stopped." in errors
    log = Path("logs/rank_0.log").read_text()
    assert "step 0 of round 0\n" in log
    assert f"step {STEPS - 1} of round 1\n" in log
    assert check_training() == {0: 2, 1: 2}


TELL = """
def trouble(step):
    if first_round and step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGTERM)
"""


@pytest.mark.sweep
def test_a_host_that_is_told_to_end_saves_first_and_costs_no_step(folder):
    write_script(TELL)
    where = ["--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(find_free_port()), "--num_gpus", "1"]
    configuration = json.dumps({**ELASTIC, "checkpoint": {"async_save": True, "on_sigterm": True}})
    limits = ["--num_nodes", "2", "--max_restarts", "0"]
    stays = start(*where, "--node_rank", "0", *limits, "train.py", configuration)
    leaves = start(*where, "--node_rank", "1", "--max_restarts", "0", "train.py", configuration)
    errors = [job.communicate(timeout=LIMIT_S)[1] for job in (leaves, stays)]
    assert (leaves.returncode, stays.returncode) == (143, 0), errors
    assert "SIGTERM: saved in saved after step" in "".join(errors)
    assert check_training() == {0: 2, 1: 1}
    records = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    steps = [(record["round"], record["step"]) for record in records if record["ids"]]
    assert not {step for number, step in steps if number == 0} & {step for number, step in steps if number == 1}


# Rank 0 tells its node to end once rank 1 is there.
END_ALL = """
import os, signal
open("both_are_there", "r" if os.environ["RANK"] == "0" else "w").close()
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def test_the_host_that_keeps_the_list_is_told_to_end(folder, warm):
    Path("train.py").write_text(END_ALL)
    os.mkfifo("both_are_there")
    where = ["--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(find_free_port()), "--num_gpus", "1"]
    keeps = start(*where, "--node_rank", "0", "--num_nodes", "2", "train.py")
    other = start(*where, "--node_rank", "1", "train.py")
    errors = [job.communicate(timeout=LIMIT_S)[1] for job in (keeps, other)]
    assert (keeps.returncode, other.returncode) == (143, 143), errors
    last = [each.splitlines()[-1] for each in errors]
    assert last[0] == "deepspeed: the run was ended by SIGTERM"
    assert last[1].startswith("deepspeed: node 0 was told to end (SIGTERM); the ranks of node 1 ")
    assert "is lost" not in errors[0]


# Says where it is, and waits to be killed.
WAIT = """
import json, os, signal, socket
names = ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE")
report = [int(os.environ[name]) for name in names] + [os.getpid(), os.getppid()]
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(json.dumps(report).encode(), "reports")
while True:
    signal.pause()
"""


class Nodes:
    """Four nodes of two ranks, started by hand; all ranks report to a socket. Node 0 keeps the list."""

    def __init__(self, num_nodes=4):
        Path("wait.py").write_text(WAIT)
        self.reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reports.bind("reports")
        self.reports.settimeout(LIMIT_S)
        self.port = find_free_port()
        self.world, self.started, self.pids = 2 * num_nodes, 0, set()
        self.agents = {}
        for _ in range(num_nodes):
            self.add()

    def add(self):
        words = ["--no_ssh", "--node_rank", str(self.started), "--num_nodes", "4", "--num_gpus", "2"]
        words += ["--master_addr", "127.0.0.1", "--master_port", str(self.port), "--max_restarts", "1000"]
        job = start(*words, "wait.py", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.agents[job.pid] = job
        self.started += 1

    def whole_round(self):
        """Rank -> process and agent of the next round that has all ranks."""
        rounds = {}
        while True:
            number, rank, world, pid, agent = json.loads(self.reports.recv(1000))
            self.pids.add(pid)
            rounds.setdefault(number, {})[rank] = (pid, agent)
            if world == self.world and len(rounds[number]) == world:
                return rounds[number]


def test_no_host_stays_behind_when_the_launcher_is_killed(hosts, warm):
    Path("wait.py").write_text(WAIT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
        reports.bind("reports")
        reports.settimeout(LIMIT_S)
        job = start("-H", "hosts", "wait.py")
        pids = {pid for _ in range(4) for pid in json.loads(reports.recv(1000))[3:]}
    assert len(pids) == 6  # four ranks of two agents
    job.kill()
    job.communicate(timeout=LIMIT_S)
    wait_for_end(pids, LIMIT_S)


WRONG_CONFIG = """
import deepspeed, torch
open(f"started-{os.getpid()}", "w").close()
deepspeed.initialize(model=torch.nn.Linear(1, 1), config={"train_batch_size": 3, "train_micro_batch_size_per_gpu": 1})
"""


@pytest.mark.sweep
def test_a_batch_that_the_ranks_cannot_compute_ends_the_job_at_once(folder):
    (folder / "train.py").write_text("import os" + WRONG_CONFIG)
    job = start("--num_gpus", "2", "train.py")
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1
    assert errors.startswith("deepspeed: error: train_batch_size: found 3, which is not a multiple of"), errors
    assert len(list(folder.glob("started-*"))) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2))
def test_random_kills_of_ranks_and_agents(folder, seed):
    rng, nodes = random.Random(seed), Nodes()
    first = next(iter(nodes.agents))  # has the list of nodes
    ranks = nodes.whole_round()
    for _ in range(int(os.environ.get("KILLS", "12"))):
        pid, agent = rng.choice(list(ranks.values()))
        if agent != first and rng.random() < 0.4:
            killed = nodes.agents.pop(agent)
            killed.kill()
            killed.wait(LIMIT_S)
            nodes.add()
        else:
            os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
        ranks = nodes.whole_round()
    nodes.agents[first].kill()
    codes = {pid: job.wait(LIMIT_S) for pid, job in nodes.agents.items()}
    assert codes == {pid: -signal.SIGKILL if pid == first else 1 for pid in codes}
    nodes.reports.close()
    wait_for_end(nodes.pids, LIMIT_S)
    assert is_free(nodes.port)
