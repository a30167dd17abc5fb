"""`deepspeed --hostfile` over two hosts, by the stand-in for ssh of conftest.py.

No test sleeps: end of file on the output says that every process that held it is gone.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.launcher.launch import find_free_port
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.forked import wait_for_end
from deepspeed.testing.tiers import swept

LIMIT_S = 120
HOSTS = "127.0.0.1 slots=2\n127.0.0.2 slots=2\n"
COMMAND = ["-c", "from deepspeed.launcher.runner import main; main()"]
AWKWARD = "a b\"c'$d\n%n `e` \\ *"

REPORT = """
import json, os, sys
report = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}
with open(os.environ["RANK"] + ".json", "w") as file:
    json.dump(report, file)
"""
# Each rank says who it is, in one write so that lines do not mix, and waits for ever with a child of its own.
WAIT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
os.write(1, f"ready {os.environ['RANK']} {os.getpid()} {child.pid}\\n".encode())
"""


#: three steps of `engine`, on random numbers of its rank
STEPS = """
random = torch.Generator().manual_seed(engine.global_rank)
losses = []
for _ in range(3):
    loss = engine(torch.randn(4, 8, generator=random).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
"""
TRAIN = (
    """
import json, os, deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
          "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, config=config)
"""
    + STEPS
    + """with open(f"{os.environ['CROSS_SIZE']}-{os.environ['RANK']}.json", "w") as file:
    json.dump(losses, file)
"""
)


def flags(*more):
    return ["-H", "hosts", "--launcher", "ssh", "--master_port", str(find_free_port()), *more]


def reports(folder, num_ranks):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


class Running:
    """A launch whose ranks all wait: their pids, and those of their children, in `pids`."""

    def __init__(self, script, *own, num_ranks=4):
        Path("train.py").write_text(script)
        self.process = subprocess.Popen(
            [sys.executable, *COMMAND, *flags(*own), "train.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - no thread here
        )
        self.pids = {}
        while len(self.pids) < num_ranks:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            _, ready, rank, *pids = line.split()
            assert ready == "ready"
            self.pids[int(rank)] = [int(pid) for pid in pids]

    def end(self):
        out, err = self.process.communicate(timeout=LIMIT_S)
        wait_for_end((pid for pids in self.pids.values() for pid in pids), LIMIT_S)
        return self.process.returncode, out, err


def test_each_rank_finds_its_place_and_its_arguments(hosts, warm, launch, monkeypatch):
    (hosts / "train.py").write_text(REPORT)
    (hosts / ".deepspeed_env").write_text("FROM_FILE=x 'y' \"z\"\nNCCL_WINS=file\n")
    monkeypatch.setenv("NCCL_WINS", "shell")
    monkeypatch.setenv("NCCL_AWKWARD", AWKWARD)
    monkeypatch.setenv("STAYS_HERE", "1")
    done = launch(*flags(), "train.py", AWKWARD, "--num_gpus", "9", "")
    assert done.returncode == 0, done.stderr
    for rank, report in enumerate(reports(hosts, 4)):
        local_rank, node = rank % 2, rank // 2
        env = report["env"]
        assert report["argv"] == [f"--local_rank={local_rank}", AWKWARD, "--num_gpus", "9", ""]
        assert report["cwd"] == str(hosts)
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_SIZE"]) == (
            str(rank),
            str(local_rank),
            "4",
            "2",
        )
        assert (env["CROSS_RANK"], env["CROSS_SIZE"]) == (str(node), "2")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["SSH_HOST"] == f"127.0.0.{node + 1}"
        assert (env["NCCL_WINS"], env["NCCL_AWKWARD"], env["FROM_FILE"]) == ("file", AWKWARD, "x 'y' \"z\"")
        assert "STAYS_HERE" not in env


def losses_of_one_host():
    names = {}
    exec(TRAIN.partition("with open")[0], names)  # noqa: S102 - the script of the hosts
    return names["losses"]


def test_two_hosts_train_as_one(hosts, warm, launch):
    (hosts / "train.py").write_text(TRAIN)
    done = launch(*flags(), "train.py")
    assert done.returncode == 0, done.stderr
    for rank, one in enumerate(run_ranks(4, losses_of_one_host)):
        assert json.loads((hosts / f"2-{rank}.json").read_text()) == pytest.approx(one, rel=1e-6)
        assert one[2] != one[0]


def test_nodes_that_are_started_by_hand_meet_and_end_together(hosts, warm):
    (hosts / "train.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '3': raise ValueError('boom')\nsignal.pause()\n"
    )
    port = str(find_free_port())
    own = ["--no_ssh", "--num_nodes", "2", "--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    nodes = [
        subprocess.Popen(
            [sys.executable, *COMMAND, *own, "--node_rank", str(node), "train.py"], stderr=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]
    errors = [node.communicate(timeout=LIMIT_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    assert errors[0] == "deepspeed: rank 3 on node 1 failed: ValueError: boom; the ranks of node 0 were stopped\n"
    assert errors[1].endswith("shown above: ValueError: boom\n")


def test_a_failing_rank_ends_all_hosts_and_is_told_last(hosts):
    os.mkfifo("all_are_there")
    fails = "if os.environ['RANK'] == '3': open('all_are_there').close(); raise ValueError('boom')\n"
    running = Running(WAIT + fails + "signal.pause()\n")
    Path("all_are_there").write_text("")
    code, _, err = running.end()
    assert code == 1
    assert "deepspeed: on 127.0.0.2:" in err
    assert err.rstrip().splitlines()[-1].endswith("ValueError: boom")


@pytest.mark.parametrize("number", swept([signal.SIGINT, signal.SIGTERM], lambda number: number == signal.SIGINT))
def test_a_signal_ends_all_hosts(hosts, number):
    running = Running(WAIT + "signal.pause()\n")
    running.process.send_signal(number)
    code, _, _ = running.end()
    assert code == 128 + number


def test_no_host_stays_behind_when_the_launcher_is_killed(hosts):
    running = Running(WAIT + "signal.pause()\n")
    running.process.kill()
    code, _, _ = running.end()
    assert code == -signal.SIGKILL


def test_a_host_that_cannot_be_reached_is_named_and_nothing_starts(hosts, launch):
    (hosts / "hosts").write_text(HOSTS + "gone-1 slots=2\n")
    (hosts / "train.py").write_text(REPORT)
    done = launch(*flags(), "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("deepspeed: error: gone-1: cannot be reached by ssh (gone-1: ssh: connect to host")
    assert done.stderr.count("\n") == 1
    asked = (hosts / "ssh.log").read_text().splitlines()
    assert sorted(asked) == ["127.0.0.1 hostname -I", "127.0.0.2 hostname -I", "gone-1 hostname -I"]


def test_without_the_check_the_first_host_is_still_asked_for_its_address(hosts, launch):
    (hosts / "hosts").write_text("gone-1 slots=2\n" + HOSTS)
    (hosts / "train.py").write_text(REPORT)
    done = launch(*flags("--no_ssh_check"), "train.py")
    assert done.returncode == 2
    assert "and its address is asked for there; give --master_addr" in done.stderr
    assert (hosts / "ssh.log").read_text().splitlines() == ["gone-1 hostname -I"]


def test_a_host_that_is_lost_at_the_start_ends_the_others(hosts, launch):
    (hosts / "hosts").write_text(HOSTS + "gone-1 slots=2\n")
    (hosts / "train.py").write_text(REPORT)
    done = launch(*flags("--no_ssh_check", "--master_addr", "127.0.0.1"), "train.py")
    assert done.returncode == 255
    assert done.stderr.rstrip().splitlines()[-1].startswith("deepspeed: gone-1: the connection failed or was lost")
    assert not list(hosts.glob("*.json"))


def test_dry_run_prints_what_each_host_would_run(hosts, launch):
    (hosts / "train.py").write_text(REPORT)
    done = launch(*flags("--dry_run", "--no_ssh_check", "--ssh_port", "2222"), "train.py", AWKWARD)
    assert done.returncode == 0, done.stderr
    assert not (hosts / "ssh.log").exists()
    assert done.stdout.startswith("127.0.0.1: ssh ")
    assert "\n127.0.0.2: ssh " in done.stdout
    assert done.stdout.count(" -p 2222 ") == 2
