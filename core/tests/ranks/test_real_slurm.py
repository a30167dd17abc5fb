"""A real Slurm of two nodes on this machine, by Debian's `slurm-wlm` and `munge`: `srun`, and `--launcher slurm`.

The daemons are started here, in a folder of the test, and end with it; Slurm's service need not run.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepspeed.launcher.launch import find_free_port
from deepspeed.testing.forked import wait_for_end

from .test_many_hosts import STEPS

LIMIT_S = 200
AWKWARD = "a b\"c'$d\n%n `e` \\ *"
DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"/usr/sbin:/usr/bin:{os.environ['PATH']}"
CONFIG = """
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=127.0.0.1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=127.0.0.2 NodeHostname=localhost NodeAddr=127.0.0.2 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""
TRAIN = (
    """
import json, os, sys, deepspeed, torch
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1}})
"""
    + STEPS
    + """place = [os.environ.get("SLURMD_NODENAME"), os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]]
with open(f"{os.environ.get('SLURM_STEP_NUM_NODES', '1')}-{os.environ['RANK']}.json", "w") as file:
    json.dump([losses, place, sys.argv[-1], os.environ["NCCL_AWKWARD"]], file)
"""
)
# Rank 3 fails; the others wait for something else, which never comes.
FAIL = """
import os, signal
print("pid", os.getpid())
if os.environ["SLURM_PROCID"] == "3":
    raise ValueError("boom")
signal.pause()
"""


def run(*command):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def slurm(folder, monkeypatch):
    """Two nodes, 127.0.0.1 and 127.0.0.2, that wait for jobs."""
    programs = {name: shutil.which(name, path=PATH) for name in (*DAEMONS, "srun", "sinfo")}
    if None in programs.values():
        pytest.skip(f"{', '.join(name for name in programs if not programs[name])}: not installed (slurm-wlm, munge)")
    if os.getuid() != 0:
        pytest.skip("slurmd runs jobs as root only")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PMI_")):
            monkeypatch.delenv(name)
    ports = [find_free_port() for _ in range(3)]
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(name=os.uname().nodename, folder=folder, ports=ports))
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    monkeypatch.setenv("SLURM_CONF", str(config))
    monkeypatch.setenv("MASTER_PORT", str(find_free_port()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_AWKWARD", AWKWARD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    munge = ["--key-file", "key", "--socket", "munge", "--pid-file", "munge.pid", "--seed-file", "seed"]
    options = [word if word.startswith("-") else str(folder / word) for word in munge]
    commands = [
        [programs["munged"], "-F", "--force", *options, "--log-file", str(folder / "munge.log")],
        [programs["slurmctld"], "-D", "-f", str(config)],
        *([programs["slurmd"], "-D", "-f", str(config), "-N", node] for node in ("127.0.0.1", "127.0.0.2")),
    ]
    daemons = []
    with (folder / "daemons.log").open("wb") as log:
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
                if command is commands[0]:
                    _until(lambda: Path(folder / "munge").exists(), folder)
            _until(lambda: run(programs["sinfo"], "-h", "-o", "%D %t").stdout == "2 idle\n", folder)
            yield folder
            _until(lambda: run("squeue", "-h").stdout == "", folder)  # else a node waits for the controller at its end
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(LIMIT_S)


def _until(is_so, folder):
    """Ask again and again, without a pause: nobody tells when a daemon answers."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, (folder / "daemons.log").read_text()


def test_two_nodes_train_as_one_host(slurm, launch):
    (slurm / "train.py").write_text(TRAIN)
    assert launch("--num_accelerators", "4", "train.py", AWKWARD).returncode == 0
    starts = {
        "srun": lambda: run("srun", "-N", "2", "--ntasks-per-node", "2", sys.executable, "train.py", AWKWARD),
        "deepspeed": lambda: launch("--launcher", "slurm", "--num_nodes", "2", "--num_gpus", "2", "train.py", AWKWARD),
    }
    for name, start in starts.items():
        done = start()
        assert done.returncode == 0, (name, done.stderr)
        for rank in range(4):
            one, two = (json.loads((slurm / f"{num}-{rank}.json").read_text()) for num in (1, 2))
            assert two[0] == pytest.approx(one[0], rel=1e-6)
            assert two[1:] == [[f"127.0.0.{rank // 2 + 1}", str(rank % 2), "4"], AWKWARD, AWKWARD], name
            (slurm / f"2-{rank}.json").unlink()


def test_a_rank_that_fails_ends_the_others(slurm, launch):
    (slurm / "train.py").write_text(FAIL)
    done = launch("--launcher", "slurm", "--num_nodes", "2", "--num_gpus", "2", "train.py")
    assert done.returncode != 0
    assert "ValueError: boom" in done.stderr
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pid ")]
    assert pids
    wait_for_end(pids, LIMIT_S)
