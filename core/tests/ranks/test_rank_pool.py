"""The warm rank pool itself: reuse, failures, hangs, deaths, and what it puts back."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import deepspeed.comm as dist
import psutil
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups
from deepspeed.testing import distributed, forked
from deepspeed.testing.distributed import RankError, run_ranks


@dataclass
class Answer:
    rank: int
    values: torch.Tensor


def answer_job(offset, tensor):
    return Answer(dist.get_rank(), tensor + offset)


def environment_job():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    return os.getpid(), torch.get_num_threads(), [os.environ[name] for name in names]


def leave_traces_job():
    os.environ["DS_TEST_TRACE"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    dist.configure(enabled=True)


def traces_job():
    left = os.environ.get("DS_TEST_TRACE"), torch.get_default_dtype(), torch.is_grad_enabled()
    return (*left, dist.comms_logger.enabled, torch.rand(1).item())


def fail_job(kind, rank):
    if dist.get_rank() == rank:
        if kind == "config":
            raise ConfigError("zero_optimization.stage: found 9")
        if kind == "assert":
            assert rank == 17, "not seventeen"
        if kind == "exit":
            sys.exit(3)
        if kind == "kill":
            os.kill(os.getpid(), 9)
        raise Picky(1, 2)
    dist.barrier()  # which the failing rank never enters


class Picky(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, one, two):
        super().__init__("picky")
        self.lock = threading.Lock()


def wait_beside_it():
    threading.Event().wait()


def hang_job():
    if dist.get_rank() == 0:
        threading.Thread(target=wait_beside_it, daemon=True).start()
        threading.Event().wait()


def say_job():
    print(f"rank {dist.get_rank()} was here", flush=True)


def hash_job():
    return hash("a parameter's name")


def leave_wreck_job():
    groups.reset = None


def destroy_job():
    torch.distributed.destroy_process_group()


def test_results_by_rank_and_classes_of_this_file():
    answers = run_ranks(2, answer_job, 1, torch.arange(3))
    assert [a.rank for a in answers] == [0, 1]
    assert all(isinstance(a, Answer) and a.values.tolist() == [1, 2, 3] for a in answers)


def test_processes_are_reused_and_have_one_thread():
    first, second = run_ranks(2, environment_job), run_ranks(2, environment_job)
    assert first == second
    assert [answer[1:] for answer in first] == [(1, ["0", "0", "2", "1"]), (1, ["1", "1", "2", "1"])]


def test_a_job_leaves_no_traces():
    before = run_ranks(1, traces_job)
    run_ranks(1, leave_traces_job)
    ((variable, dtype, grad, recording, random),) = run_ranks(1, traces_job)
    assert (variable, dtype, grad, recording) == (None, torch.float32, True, False)
    assert run_ranks(1, traces_job)[0][-1] == random
    assert len(before) == 1


@pytest.mark.parametrize(
    ("world_size", "kind", "error", "message"),
    [
        (2, "config", ConfigError, "zero_optimization.stage: found 9"),
        (1, "assert", AssertionError, "not seventeen"),
        (1, "exit", RankError, "SystemExit: 3"),
        (2, "kill", RankError, "was killed by SIGKILL"),
        (1, "picky", RankError, "Picky: picky"),
    ],
)
def test_a_failure_is_raised_here_with_its_rank(world_size, kind, error, message):
    with pytest.raises(error) as caught:
        run_ranks(world_size, fail_job, kind, world_size - 1)
    text = str(caught.value)
    assert text.startswith(f"[rank {world_size - 1} of {world_size}] fail_job failed:")
    assert message in text
    if kind != "kill":
        assert "in fail_job" in text
    assert len(run_ranks(world_size, environment_job)) == world_size  # new processes


def test_a_hang_ends_and_shows_where():
    run_ranks(2, environment_job)  # this file is loaded there now
    with pytest.raises(RankError) as caught:
        run_ranks(2, hang_job, timeout_s=5)
    text = str(caught.value)
    assert "hang_job did not end within 5 s on rank 0" in text
    assert "in hang_job" in text
    assert "in wait_beside_it" in text


def test_a_rank_that_ends_between_jobs_is_described():
    first = run_ranks(2, environment_job)
    run_ranks(2, say_job)
    process = distributed._pools[2, ()]._processes[1]
    process.kill()
    process.wait()
    with pytest.raises(RankError) as caught:
        run_ranks(2, environment_job)
    text = str(caught.value)
    assert text.startswith("[rank 1 of 2] ended before the job environment_job; the job before it, say_job, had ended")
    assert "was killed by SIGKILL" in text
    said = text.partition("its last output:\n")[2].splitlines()
    assert said[-1] == "rank 1 was here"  # gloo may have said something before
    second = run_ranks(2, environment_job)
    assert {answer[0] for answer in first}.isdisjoint(answer[0] for answer in second)


def test_ranks_hash_strings_differently():
    random = {"PYTHONHASHSEED": "random"}  # whatever the environment says
    assert (
        len(set(run_ranks(2, hash_job, environment=random))) == 2
    )  # or a loop over a set would go the same way on all of them


def test_a_process_that_forks_is_replaced():
    before = run_ranks(1, environment_job)
    for server in forked._servers.values():
        server._process.kill()
        server._process.wait()
    distributed.shut_down()
    assert run_ranks(1, environment_job) != before


def test_what_a_job_leaves_behind_fails_that_job():
    with pytest.raises(TypeError, match="leave_wreck_job failed"):
        run_ranks(1, leave_wreck_job)
    assert len(run_ranks(1, environment_job)) == 1


def test_a_job_that_is_interrupted_here_does_not_answer_the_next(monkeypatch):
    run_ranks(2, environment_job)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(2, answer_job, 1, torch.arange(3))
    assert len(run_ranks(2, environment_job)[0]) == 3


def test_ending_the_pools_group_is_an_error():
    with pytest.raises(RuntimeError, match="use groups of its own"):
        run_ranks(1, destroy_job)


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="module-level"):
        run_ranks(1, lambda: None)
    with pytest.raises(TypeError, match="file"):
        run_ranks(1, len)


def test_ranks_die_with_their_parent():
    script = (
        "import os\n"
        "from deepspeed.testing import distributed, models\n"
        "distributed.run_ranks(1, models.GPTConfig.__post_init__, models.GPTConfig())\n"
        "print(*[p.pid for p in distributed._pools[1, ()]._processes], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -9, done.stderr
    pid = int(done.stdout)
    if psutil.pid_exists(pid):
        try:
            psutil.Process(pid).wait(timeout=30)
        except psutil.NoSuchProcess:
            return
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
