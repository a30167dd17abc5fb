"""What `ccl` says when a rank does something else, does not come, or is gone; and that it leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from ds_ext_cpu.comm import ccl
from ds_ext_cpu.op_builder.comm import CCLCommBuilder
from ds_ext_cpu.testing import TRANSPORTS, ccl_group, raised_by

SHORT = timedelta(seconds=0.5)


def differ_job(transport):
    """Pairs of what the ranks do: each raises on both, and names both."""
    rank = torch_dist.get_rank()

    def all_reduce(group, numel=3, dtype=torch.float32, **kwargs):
        torch_dist.all_reduce(torch.ones(numel, dtype=dtype), group=group, **kwargs)

    def swap(group, taken, given):
        torch_dist.all_to_all_single(torch.ones(4), torch.ones(4), taken, given, group=group)

    pairs = {
        "sizes": (all_reduce, lambda group: all_reduce(group, 4)),
        "types": (all_reduce, lambda group: all_reduce(group, dtype=torch.float64)),
        "operations": (all_reduce, lambda group: all_reduce(group, op=torch_dist.ReduceOp.MAX)),
        "kinds": (all_reduce, lambda group: torch_dist.broadcast(torch.ones(3), 0, group=group)),
        "roots": tuple(lambda group, n=n: torch_dist.broadcast(torch.ones(3), n, group=group) for n in (0, 1)),
        "barriers": (all_reduce, lambda group: torch_dist.barrier(group=group)),
        "counts": (lambda group: swap(group, [2, 2], [2, 2]), lambda group: swap(group, [1, 3], [3, 1])),
        "messages": (
            lambda group: torch_dist.send(torch.ones(3), 1, group=group),
            lambda group: torch_dist.recv(torch.ones(4), 0, group=group),
        ),
    }
    found, later = {}, []
    for name, calls in pairs.items():
        with ccl_group(transport) as group:
            found[name] = raised_by(lambda: calls[rank](group))
            later.append(raised_by(lambda: torch_dist.barrier(group=group)).partition(": ")[2])
    return found, later


@pytest.mark.parametrize("transport", ["shm"])
def test_ranks_that_differ_are_both_named(transport):
    answers = run_ranks(2, differ_job, transport)
    assert answers[0][1] == answers[1][1]  # the first failure stays, on all ranks
    for rank, (found, later) in enumerate(answers):
        assert all("rank" in text for text in later)
        assert all("rank 0" in text and "rank 1" in text for text in found.values()), found
        assert "an all-reduce (sum) of 3 float32" in found["sizes"]
        assert "an all-reduce (sum) of 4 float32" in found["sizes"]
        assert "an all-reduce (sum) of 3 float64" in found["types"]
        assert "an all-reduce (max) of 3 float32" in found["operations"]
        assert "a broadcast of 3 float32 from rank 0 of the group" in found["kinds"]
        assert "from rank 1 of the group" in found["roots"]
        assert "a barrier" in found["barriers"]
        assert re.search(
            r"expects \d+ bytes from rank \d in an all-to-all of float32, which gives it \d+", found["counts"]
        )
        assert "receives a message of 16 bytes with tag 0 from rank 0, which sends one of 12" in found["messages"], rank


def late_job(talks):
    rank = torch_dist.get_rank()
    with ccl_group("shm", SHORT) as group:
        torch_dist.all_reduce(torch.ones(2), group=group)
        call = {
            "collective": lambda: torch_dist.all_reduce(torch.ones(3), group=group),
            "message": lambda: torch_dist.recv(torch.ones(3), 0, group=group, tag=5),
        }[talks]
        return raised_by(call if rank == 1 else lambda: None)


def test_a_rank_that_does_not_come_is_named_within_the_timeout():
    none, text = run_ranks(2, late_job, "collective")
    assert none == ""
    assert text.startswith("rank 1 waited 0.5 s (the timeout) for rank 0 in an all-reduce (sum) of 3 float32")
    assert "its last collective of this group is number 1, an all-reduce (sum) of 2 float32" in text


def test_a_message_that_does_not_come_is_named_within_the_timeout():
    text = run_ranks(2, late_job, "message")[1]
    assert "rank 1 waited 0.5 s (the timeout) in receiving 12 bytes with tag 5 from rank 0" in text


def left_job():
    """Rank 0 leaves the group; nobody waits for the timeout, which is a minute."""
    with ccl_group("shm") as group:
        if torch_dist.get_rank() == 0:
            group._get_backend(torch.device("cpu")).shutdown()  # as destroy_process_group does
            return raised_by(lambda: None)
        return raised_by(lambda: torch_dist.all_reduce(torch.ones(3), group=group))


def refused_job():
    rank, three, four = torch_dist.get_rank(), torch.ones(3), torch.ones(4)
    both, largest = torch_dist.ReduceOp.BAND, torch_dist.ReduceOp.MAX
    with ccl_group("shm") as group:
        for call, words in [
            (
                lambda: torch_dist.all_reduce(three, both, group=group),
                "'and' of tensors of Float",
            ),
            (
                lambda: torch_dist.all_reduce(three + 1j, largest, group=group),
                "complex",
            ),
            (lambda: torch_dist.recv(three, group=group), "any rank"),
            (lambda: torch_dist.all_gather([three], three, group=group), "one per rank"),
            (
                lambda: torch_dist.all_to_all_single(four, four, [1, 1], [2, 2], group=group),
                "one size per rank",
            ),
        ]:
            with pytest.raises((ValueError, RuntimeError), match=words):
                call()
        total = torch.full((3,), rank + 1.0)
        torch_dist.all_reduce(total, group=group)  # the group is whole
        assert total.tolist() == [3.0] * 3


def test_what_is_not_here_is_refused_by_name():
    run_ranks(2, refused_job)


SCRIPT = """
import os, signal, sys, threading
from datetime import timedelta
import torch, torch.distributed as torch_dist
from ds_ext_cpu.comm import ccl
from ds_ext_cpu.testing import TRANSPORTS, ccl_group, raised_by
ccl.register()
torch_dist.init_process_group("ccl", timeout=timedelta(minutes=5))
rank, ends = torch_dist.get_rank(), sys.argv[1]
torch_dist.all_reduce(torch.ones(10**6))
print("segments", [name for name in os.listdir("/dev/shm") if name.startswith("ds_ccl.") and str(os.getpid()) in name])
if rank == 1 and ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0 and ends == "interrupted":
    message, library = torch.ones(1), torch_dist.group.WORLD._get_backend(torch.device("cpu"))

    def interrupt(number):
        while library.num_started < number:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    for call in (lambda: torch_dist.recv(message, 1), lambda: torch_dist.all_reduce(message)):
        thread = threading.Thread(target=interrupt, args=(library.num_started + 1,))
        try:
            thread.start()
            call()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        thread.join()
    sys.stdin.readline()
    sys.exit()
if rank == 1 and ends == "interrupted":
    sys.stdin.readline()
try:
    torch_dist.all_reduce(torch.ones(10**6))
except torch_dist.DistError as error:
    print(error)
"""


def start_ranks(tmp_path, *arguments, environment=()):
    children = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2"}
        script = SCRIPT.replace('"ccl", ', f'"ccl", init_method="file://{tmp_path}/store", rank={rank}, world_size=2, ')
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={**os.environ, **variables, **dict(environment)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return children


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_is_named_at_once_and_leaves_nothing(tmp_path, transport):
    if transport == "read" and run_ranks(2, transport_job) == ["shm", "shm"]:
        pytest.skip("the kernel does not let ranks read each other's memory")
    children = start_ranks(tmp_path, "killed", environment={"DS_CCL_TRANSPORT": transport})
    out, err = children[0].communicate(timeout=120)  # the group's timeout is 5 minutes
    segments, text = out.splitlines()
    assert f"the process of rank 1 ({children[1].pid}) has ended, where rank 0 waits for it" in text, err
    children[1].communicate()
    assert children[1].returncode == -signal.SIGKILL
    assert segments == "segments []"
    assert not [path for path in Path("/dev/shm").glob("ds_ccl.*") if f".{children[0].pid}." in path.name]


def test_ctrl_c_ends_a_wait_and_peers_are_told(tmp_path):
    children = start_ranks(tmp_path, "interrupted")
    lines = [children[0].stdout.readline() for _ in range(3)]
    outputs = [child.communicate("go on\n", timeout=120) for child in reversed(children)]
    assert lines == ["segments []\n", "interrupted\n", "interrupted\n"], outputs
    assert "rank 0 was interrupted in an all-reduce (sum) of 1 float32" in outputs[0][0], outputs


def transport_job():
    with ccl_group() as group:
        return ccl.transport(group)


def test_a_rank_that_leaves_is_named_at_once():
    text = run_ranks(2, left_job)[1]
    assert text.startswith("rank 0 has left the group, where rank 1 waits for it in an all-reduce (sum) of 3 float32")


def test_what_killed_ranks_left_is_swept_and_nothing_else(monkeypatch, tmp_path):
    module = CCLCommBuilder().load()
    monkeypatch.setattr(ccl, "_FOLDER", tmp_path)
    user, space, process = os.getuid(), ccl._name_space(), os.getpid()
    start = module.start_time(process)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = {
        "own": f"ds_ccl.{user}.{space}.{process}.{start}.ab",
        "of another user": f"ds_ccl.{user + 1}.{space}.{ended.pid}.5.ab",
        "of another name space": f"ds_ccl.{user}.{space + 1}.{ended.pid}.5.ab",
        "of another program": "ds_ccl.notes",
    }
    gone = {
        "ended": f"ds_ccl.{user}.{space}.{ended.pid}.5.ab",
        "its number was used again": f"ds_ccl.{user}.{space}.{process}.{start - 1}.ab",
    }
    for name in (*kept.values(), *gone.values()):
        (tmp_path / name).touch()
    ccl.sweep(module)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept.values())


def test_ranks_of_several_hosts_are_told_of_gloo():
    with pytest.raises(CommError, match=r"in 2 places \(ranks 0, 1 on one; 2 on two; .*dist_backend=\"gloo\""):
        ccl._check_hosts(["boot/1 one", "boot/1 one", "boot/2 two"], [0, 1, 2])
    ccl._check_hosts(["boot/1 one"] * 2, [0, 1])


def full_job():
    """Every rank says that there is no memory, not the first one alone."""

    def fallocate(*_):
        raise OSError(28, "No space left on device")

    before = set(ccl._FOLDER.glob("ds_ccl.*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(CommError, match="KiB of shared memory are needed, and /dev/shm is full"), ccl_group():
            pass
    mine = [path for path in set(ccl._FOLDER.glob("ds_ccl.*")) - before if f".{os.getpid()}." in path.name]
    assert mine == []


def test_a_lack_of_shared_memory_is_said_on_every_rank():
    run_ranks(2, full_job)


def misspelt_job():
    with pytest.raises(CommError, match="DS_CCL_TRANSPORT=tcp: 'read' .* or 'shm'"), ccl_group("tcp"):
        pass


def contradicting_job():
    own = ["shm", "read"][torch_dist.get_rank()]
    with pytest.raises(CommError, match="'read' on rank 1 and 'shm' on rank 0; set the same"), ccl_group(own):
        pass


def test_transports_that_cannot_be():
    run_ranks(2, misspelt_job)
    run_ranks(2, contradicting_job)
