"""`deepspeed` when something goes wrong around the ranks: errors of several, a full disk, a slow console, signals.

Real processes; no test sleeps.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.testing.tiers import swept

LIMIT_S = 120
COMMAND = [sys.executable, "-c", "from deepspeed.launcher.runner import main; main()"]


def start(script, **kwargs):
    """A launch that runs, once both ranks have written a line that starts with `ready`."""
    Path("train.py").write_text(script)
    job = subprocess.Popen(
        [*COMMAND, "--num_accelerators", "2", "train.py"], stdout=subprocess.PIPE, text=True, **kwargs
    )
    assert [job.stdout.readline()[:5] for _ in range(2)] == ["ready"] * 2
    return job


# ---- errors of several ranks ----------------------------------------------------------------------------------------

WRONG_CONFIG = """
import deepspeed, torch
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 9}}
deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config)
"""


def test_a_config_error_is_one_line(folder, warm, launch, monkeypatch):
    (folder / "train.py").write_text(WRONG_CONFIG)
    done = launch("--num_accelerators", "2", "--log_dir", "logs", "train.py")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("deepspeed: error: zero_optimization.stage: ")
    assert done.stderr.count("\n") == 1
    logs = [(folder / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert any("Traceback" in log and "deepspeed.initialize(" in log for log in logs)

    (folder / "train.py").write_text("import deepspeed\nraise deepspeed.errors.ConfigError('found 9')\n")
    monkeypatch.setenv("DS_LOG_LEVEL", "debug")
    assert "Traceback" in launch("--num_accelerators", "1", "train.py").stderr


# ---- ranks that wait for one that has ended --------------------------------------------------------------------------

ALONE = """
import os, sys
import deepspeed, torch
case, rank = sys.argv[-1], int(os.environ["RANK"])
zero = {"stage": 3 if case == "forward" else 1, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "SGD"}}
engine = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
if rank == 0:
    if case == "save":
        engine.save_checkpoint("saved")
    elif case == "save_16bit":
        engine.save_16bit_model("saved")
    elif case == "forward":
        with torch.no_grad():
            engine(torch.ones(1, 8))
    else:
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
elif case == "save":
    os._exit(0)  # says nothing: the launcher does
"""
ALONE_CASES = [(case, direct) for case in ("save_16bit", "forward", "step") for direct in "10"]


@pytest.mark.parametrize("direct", swept("10", lambda direct: direct == "1"))
def test_a_rank_does_not_wait_for_one_that_has_ended_without_a_word(folder, warm, launch, monkeypatch, direct):
    monkeypatch.setenv("DS_COMM_DIRECT", direct)
    (folder / "train.py").write_text(ALONE)
    done = launch("--num_accelerators", "2", "train.py", "save")
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert "rank 0 called save_checkpoint and rank 1 has ended without it" in last


@pytest.mark.parametrize(
    ("case", "direct"), swept(ALONE_CASES, lambda *each: each in {("save_16bit", "1"), ("forward", "0")})
)
def test_a_rank_does_not_wait_for_one_that_has_ended(folder, start_ranks, monkeypatch, case, direct):
    monkeypatch.setenv("DS_COMM_DIRECT", direct)
    (first, said), (second, _) = (rank.end() for rank in start_ranks(ALONE, case))
    assert (first, second) == (1, 0)
    last = said.rstrip().splitlines()[-1]
    if case == "save_16bit":
        assert "rank 1 has ended" in last
        assert "Connection closed" not in said, "the library's words, which blame a crash"
    else:
        assert re.search(r"rank 1 (has|\(process \d+\)) ended", last), last


# ---- ranks that hang -------------------------------------------------------------------------------------------------

HANGS = """
import os, sys, threading
from datetime import timedelta
import deepspeed, torch
case, rank = sys.argv[-1], int(os.environ["RANK"])
deepspeed.init_distributed(timeout=timedelta(seconds=20))

def hang(where):
    if case == where and rank == 1:
        threading.Event().wait()
    if case == "error" and rank == 1:
        raise ValueError("boom")

class Net(torch.nn.Linear):
    def forward(self, x):
        hang("forward")
        return super().forward(x)

def batches():
    hang("loader")
    yield torch.ones(1, 4)

config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"}}
engine = deepspeed.initialize(model=Net(4, 4), config=config)[0]
for batch in batches():
    engine.backward(engine(batch).sum())
    if case == "collective" and rank == 1:
        torch.distributed.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=100))
    engine.step()
"""


HANG_CASES = [("loader", "in batches"), ("forward", "in forward"), ("collective", "in <module>")]


@pytest.mark.parametrize(("case", "frame"), swept(HANG_CASES, lambda *each: each[0] == "loader"))
def test_a_rank_that_hangs_is_shown_with_its_stack(folder, launch, case, frame):
    (folder / "train.py").write_text(HANGS)
    done = launch("--num_accelerators", "2", "train.py", case)
    assert done.returncode == 1
    stands, _, rest = done.stderr.partition("deepspeed: rank 0 (pid ")
    said = r"deepspeed: rank 1 \(pid \d+\) had not ended; it was here \(\S*train\.py:(\d+) in the script's own code\)"
    ((line, head),) = re.findall(rf"{said}:\n((?:  .*\n)+)", stands)
    assert re.search(rf'train\.py", line \d+, {frame}$', head, re.MULTILINE), head
    assert f'train.py", line {line}, in ' in head
    assert "to whose end ranks [1] have not come" in rest.splitlines()[-1]


def test_a_rank_that_fails_by_itself_is_not_buried_under_stacks(folder, warm, launch):
    (folder / "train.py").write_text(HANGS)
    done = launch("--num_accelerators", "2", "train.py", "error")
    assert "had not ended" not in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: boom")


# Rank 0 holds the fifo open as long as it lives. Rank 1 fails, takes the connections down, and tells why only after
# rank 0 has ended because of that.
BLAME = """
import os
import deepspeed, torch, torch.distributed as dist
fifo = os.open("fifo", os.O_RDWR if os.environ["RANK"] == "0" else os.O_RDONLY)
deepspeed.init_distributed(verbose=False)
dist.barrier()
try:
    if dist.get_rank() == 1:
        raise ValueError("boom on one")
    dist.all_reduce(torch.ones(1))
finally:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        os.read(fifo, 1)
"""


def test_the_cause_is_the_last_word_and_its_consequence_a_line(folder, warm, launch):
    (folder / "train.py").write_text(BLAME)
    os.mkfifo("fifo")
    done = launch("--num_accelerators", "2", "train.py")
    assert done.returncode == 1
    *_, consequence, verdict, _ = done.stderr.partition("Traceback (most recent call last):")[0].split("\n")
    assert consequence.startswith("deepspeed: rank 0 failed as well: ")
    assert verdict.startswith("deepspeed: rank 1 (pid ")
    assert done.stderr.endswith("ValueError: boom on one\n")
    assert done.stderr.count("Traceback") == 1


# ---- a full disk and a slow console ---------------------------------------------------------------------------------

CHATTY = """
import os, sys
for _ in range(100):
    os.write(1, b"o" * 2999 + b"\\n")
    os.write(2, b"e" * 2999 + b"\\n")
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("flag", swept(["--log_dir", "--enable_each_rank_log"], lambda flag: flag == "--log_dir"))
def test_a_full_disk_costs_the_log_file_only(folder, launch, flag):
    (folder / "train.py").write_text(CHATTY)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank_0.log").symlink_to("/dev/full")
    done = launch("--num_accelerators", "2", flag, "logs", "train.py")
    assert done.returncode == 0, done.stderr
    warning = "deepspeed: warning: logs/rank_0.log cannot be written (No space left on device)"
    assert done.stderr.count("warning") == done.stderr.count(warning) == 1
    assert (folder / "logs" / "rank_1.log").stat().st_size == 2 * 300_000
    num_shown = 2 if flag == "--log_dir" else 1  # else rank 0's alone, which has no file any more
    assert done.stdout.count("o") >= num_shown * 100 * 2999 - 2999
    assert done.stderr.count("e" * 2999) >= num_shown * 100 - 1


def test_a_console_that_does_not_block_is_waited_for(folder):
    # 60 KB each, so that a rank never waits for the launcher; together more than the console takes
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    script = "import os\nos.write(2, b'e' * 60_000)\nos.write(1, b'ready\\n')\n"
    job = start(script, stderr=write_fd)
    os.close(write_fd)
    with open(read_fd, "rb") as console:
        assert console.read() == b"e" * 120_000
    assert job.communicate(timeout=LIMIT_S)[0] == ""
    assert job.returncode == 0


# ---- signals and surroundings ---------------------------------------------------------------------------------------

# Python ignores what a handler raises in a hook of a fork; the node's process forks when it starts a rank.
TOLD_IN_A_HOOK = """
import os, signal
told = []
def tell():
    if not told and signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN):
        told.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(after_in_parent=tell)
"""


def test_a_signal_in_a_hook_of_a_fork_is_not_lost(folder, launch):
    (folder / "train.py").write_text("import signal\nwhile True:\n    signal.pause()\n")
    _, python, option, code, *rest = shlex.split(launch("--num_accelerators", "1", "--dry_run", "train.py").stdout)
    command = [python, option, TOLD_IN_A_HOOK + code, *rest]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert "Exception ignored" in done.stderr
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


ANSWERS = """
import os, signal, sys
def answer(number, frame):
    os.write(1, f"{os.environ['RANK']} {signal.Signals(number).name}\\n".encode())
    if number == signal.SIGQUIT:
        sys.exit(0)
arrived, wake = os.pipe()  # signal.pause() would miss a signal that comes just before it
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
    signal.signal(number, answer)
os.write(1, b"ready\\n")
while True:
    os.read(arrived, 1)
"""


@pytest.fixture
def default_signals():
    """A shell's background job ignores SIGQUIT, and so do its children; the launcher leaves such a signal ignored."""
    kept = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
    }
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
def test_signals_that_ask_for_a_save_reach_every_rank(folder):
    job = start(ANSWERS)
    for name in ("SIGUSR1", "SIGUSR2", "SIGQUIT"):
        job.send_signal(signal.Signals[name])
        assert sorted(job.stdout.readline() for _ in range(2)) == [f"0 {name}\n", f"1 {name}\n"]
    assert job.communicate(timeout=LIMIT_S)[0] == ""
    assert job.returncode == 0


@pytest.mark.usefixtures("default_signals")
def test_a_signal_that_nobody_handles_is_named(folder):
    job = start("import os, signal\nos.write(1, b'ready\\n')\nsignal.pause()\n", stderr=subprocess.PIPE)
    job.send_signal(signal.SIGUSR1)
    _, stderr = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGUSR1
    assert "was killed by SIGUSR1" in stderr.splitlines()[-1]


def test_the_pid_file_goes_with_a_launch_that_is_stopped_early(folder):
    (folder / "train.py").write_text("import signal\nsignal.pause()\n")
    job = subprocess.Popen([*COMMAND, "--save_pid", "train.py"], stderr=subprocess.PIPE, text=True)
    path = Path(f"/tmp/{job.pid}.ds")
    while not path.exists() or path.read_text() != str(job.pid):
        assert job.poll() is None, job.stderr.read()
    job.terminate()
    assert job.communicate(timeout=LIMIT_S)[1] in ("", "deepspeed: the run was ended by SIGTERM\n")  # how early it came
    assert job.returncode == 128 + signal.SIGTERM
    assert not path.exists()


def test_the_scripts_folder_is_the_scripts_and_not_the_launchers(folder):
    (folder / "random.py").write_text("raise RuntimeError('the launcher imports a module of the user')\n")
    (folder / "tempfile.py").write_text("raise RuntimeError('the launcher imports a module of the user')\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "train.py").write_text("import beside\nprint(beside.value)\n")
    (folder / "sub" / "beside.py").write_text("value = 'beside'\n")
    command = [*COMMAND[:2], "import sys; sys.path.pop(0); " + COMMAND[2], "--num_gpus", "1", "sub/train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "beside\n", done.stderr
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, "PYTHONSAFEPATH": "1"}
    )
    assert done.returncode == 1 or sys.version_info < (3, 11)  # as under `python sub/train.py`
