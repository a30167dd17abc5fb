"""`deepspeed` as a user calls it: real processes, their worlds, their ends.

No test sleeps: a rank says on stdout that it is ready, and end of file says that every process that held the pipe is
gone.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher.resources import available_cores
from deepspeed.testing.tiers import swept

LIMIT_S = 120
COMMAND = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()"]

REPORT = """
import json, os, sys
report = {"argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0)), "pid": os.getpid(), "env": dict(os.environ)}
with open(os.path.join(os.environ["REPORT_DIR"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(report, file)
"""
# Rank 0 and a child of its own wait for ever; both say so first, in one write, so that lines do not mix.
WAIT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) if os.environ["RANK"] == "0" else None
os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
"""


def reports(folder, num_ranks):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _listen_to_ctrl_c():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run under nohup


class Running:
    """A launch that runs: `pid_of[rank]` once all ranks have said that they are ready."""

    def __init__(self, script, *flags, num_ranks=2):
        Path("train.py").write_text(script)
        self.process = subprocess.Popen(
            [*COMMAND, "--num_accelerators", str(num_ranks), *flags, "train.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_listen_to_ctrl_c,  # noqa: PLW1509 - no thread runs here
        )
        self.pid_of = {}
        while len(self.pid_of) < num_ranks:
            word, rank, pid = self.process.stdout.readline().split()
            assert word == "ready"
            self.pid_of[int(rank)] = int(pid)

    def end(self):
        """Exit code and stderr, once every process of the job has closed its outputs."""
        _, stderr = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, stderr


def test_world_and_arguments(folder, launch):
    (folder / "train.py").write_text(REPORT)
    theirs = ["--num_gpus", "9", "--", "a b"]
    done = launch("--num_accelerators", "3", "--master_addr", "127.0.0.1", "train.py", *theirs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    worlds = reports(folder, 3)
    for rank, world in enumerate(worlds):
        env = world["env"]
        assert world["argv"] == [f"--local_rank={rank}", *theirs]
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == env["LOCAL_SIZE"] == "3"
        assert (env["CROSS_RANK"], env["CROSS_SIZE"]) == ("0", "1")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["OMP_NUM_THREADS"] == "1"
    assert len({world["env"]["MASTER_PORT"] for world in worlds}) == 1
    assert len({world["pid"] for world in worlds}) == 3


def test_module_without_local_rank_and_with_the_environment_file(folder, launch):
    (folder / "pack").mkdir()
    (folder / "pack" / "train.py").write_text(REPORT)
    (folder / ".deepspeed_env").write_text("FROM_FILE=yes\n")
    done = launch("--num_gpus", "1", "--no_local_rank", "--module", "pack.train", "--lr", "1")
    assert done.returncode == 0, done.stderr
    (world,) = reports(folder, 1)
    assert world["argv"] == ["--lr", "1"]
    assert world["env"]["FROM_FILE"] == "yes"


def test_program_on_included_slots_with_one_log_file_per_rank(folder, launch):
    program = folder / "train.sh"
    program.write_text('#!/bin/sh\necho "out $RANK $*"\necho "err $RANK" >&2\nprintf unfinished\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = launch("--no_python", "-i", "localhost:0,1", "--log_dir", "logs", "./train.sh", "x")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        written = (folder / "logs" / f"rank_{rank}.log").read_text()
        assert f"out {rank} --local_rank={rank} x\n" in written
        assert f"err {rank}\n" in written
        assert "unfinished" in written
        assert str(1 - rank) not in written
        assert f"out {rank} --local_rank={rank} x" in done.stdout
        assert f"err {rank}" in done.stderr


def test_logs_only_leave_the_console_to_the_failure(folder, launch):
    (folder / "train.py").write_text("import sys\nprint('said', flush=True)\nsys.exit('wrong learning rate')\n")
    done = launch("--num_gpus", "1", "--enable_each_rank_log", "logs", "train.py")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "wrong learning rate" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("deepspeed: rank 0 (pid ")
    assert (folder / "logs" / "rank_0.log").read_text().splitlines() == ["said", "wrong learning rate"]


def test_a_traceback_that_went_to_the_log_is_told_whole(folder, launch):
    (folder / "train.py").write_text("raise ValueError('boom')\n")
    done = launch("--num_gpus", "1", "--enable_each_rank_log", "logs", "train.py")
    assert done.returncode == 1
    assert "Its traceback:\nTraceback (most recent call last):" in done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
    assert done.stderr.count("Traceback") == 1


def test_a_traceback_on_the_console_is_there_once(folder, launch):
    (folder / "train.py").write_text("raise ValueError('boom')\n")
    done = launch("--num_gpus", "1", "--log_dir", "logs", "train.py")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("shown above: ValueError: boom\n")


def test_an_accelerator_that_is_not_there_is_one_line(folder, launch, monkeypatch):
    (folder / "train.py").write_text(REPORT)
    monkeypatch.setenv("DS_ACCELERATOR", "nonsense")
    done = launch("--num_accelerators", "2", "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("deepspeed: error: DS_ACCELERATOR=nonsense: no accelerator named 'nonsense'")
    assert done.stderr.count("\n") == 1


def test_excluding_every_device_is_one_line(folder, launch):
    (folder / "train.py").write_text(REPORT)
    done = launch("-e", "localhost:99", "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("deepspeed: error: --exclude: there is no device 99")
    assert done.stderr.count("\n") == 1


def test_cores_are_bound_and_threads_counted(folder, launch):
    cores = available_cores()
    num_ranks = min(2, len(cores))
    (folder / "train.py").write_text(REPORT)
    done = launch("--num_gpus", str(num_ranks), "--bind_cores_to_rank", "train.py")
    assert done.returncode == 0, done.stderr
    share = len(cores) // num_ranks
    worlds = reports(folder, num_ranks)
    assert [world["cores"] for world in worlds] == [
        sorted(cores[r * share : (r + 1) * share]) for r in range(num_ranks)
    ]
    assert {world["env"]["OMP_NUM_THREADS"] for world in worlds} == {str(share)}

    done = launch("--num_gpus", "2", "--bind_cores_to_rank", "--bind_core_list", str(cores[0]), "train.py")
    assert done.returncode == 2
    assert "--bind_cores_to_rank: 2 ranks cannot share 1 core " in done.stderr


def test_the_first_failure_is_the_last_word(folder, launch):
    # Rank 0 answers its end with a traceback of its own, which comes later and must not hide the cause.
    script = WAIT + (
        "if os.environ['RANK'] == '1':\n"
        "    sys.stdin.read()\n"  # at end of file, which the test does not hold back
        "    raise ValueError('boom on one')\n"
        "def stopped(number, frame): raise RuntimeError('taken down')\n"
        "signal.signal(signal.SIGTERM, stopped)\n"
        "signal.pause()\n"
    )
    Path("train.py").write_text(script)
    done = launch("--num_gpus", "2", "train.py")
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("deepspeed: rank 1 (pid ")
    assert "exit code 1" in last
    assert last.endswith("shown above: ValueError: boom on one")
    assert done.stderr.count("ValueError: boom on one") == 2, "once live, once as the last word"
    assert "elastic" not in done.stderr


def test_the_failing_ranks_exit_code_is_the_jobs(folder, launch):
    (folder / "train.py").write_text("import sys\nsys.exit(17)\n")
    done = launch("--num_gpus", "1", "train.py")
    assert done.returncode == 17
    assert "rank 0" in done.stderr.rstrip().splitlines()[-1]


def test_a_killed_rank_ends_a_job_that_does_not_listen(folder):
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT + "signal.pause()\n"
    job = Running(stubborn)
    os.kill(job.pid_of[1], signal.SIGKILL)
    code, stderr = job.end()
    assert code == 128 + signal.SIGKILL
    assert f"rank 1 (pid {job.pid_of[1]}) was killed by SIGKILL" in stderr.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "number"),
    swept(
        product([[], ["--elastic_training"]], [signal.SIGINT, signal.SIGTERM]),
        lambda flags, number: bool(flags) == (number == signal.SIGTERM),
    ),
)
def test_a_signal_to_the_launcher_ends_ranks_and_their_children(folder, flags, number):
    job = Running(WAIT + "signal.pause()\n", "--save_pid", *flags)
    pid_file = Path(f"/tmp/{job.process.pid}.ds")
    assert pid_file.read_text() == str(job.process.pid)
    job.process.send_signal(number)
    code, stderr = job.end()  # also: rank 0's child held the pipes, so it is gone too
    assert code == 128 + number
    said = [line for line in stderr.splitlines() if line.startswith("deepspeed:")]
    assert said == [f"deepspeed: the run was ended by {number.name}"]
    assert not pid_file.exists()


def test_a_rank_may_save_before_it_ends(folder):
    saves = (
        "import os, signal, sys\n"
        "def save(number, frame):\n"
        "    open('saved', 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready 0', os.getpid())\n"
        "signal.pause()\n"
    )
    job = Running(saves, num_ranks=1)
    job.process.terminate()
    assert job.end()[0] == 128 + signal.SIGTERM
    assert (folder / "saved").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_no_rank_outlives_a_killed_launcher(folder):
    job = Running(WAIT.replace('== "0"', '== "none"') + "signal.pause()\n")
    job.process.kill()
    code, _ = job.end()  # returns only when both ranks have let go of the pipes
    assert code == -signal.SIGKILL


@pytest.mark.sweep  # so do those of the tutorial's script
def test_ranks_meet(folder, launch):
    (folder / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(value)\n"
        "assert value.item() == 3\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    done = launch("--num_gpus", "2", "train.py")
    assert done.returncode == 0, done.stderr


def test_a_program_that_cannot_start_is_one_line(folder, launch):
    program = folder / "train"
    program.write_bytes(b"neither a script nor a program")
    program.chmod(0o755)
    done = launch("--num_gpus", "2", "--no_python", "./train")
    assert done.returncode == 2
    assert done.stderr.startswith("deepspeed: error: ./train: cannot be started (Exec format error); check ")
    assert done.stderr.count("\n") == 1


def test_called_by_a_program_errors_are_raised():
    from deepspeed.launcher.runner import main

    with pytest.raises(ConfigError, match="--num_nodes"):
        main(["--num_nodes", "2", __file__])
