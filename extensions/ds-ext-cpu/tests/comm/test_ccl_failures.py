"""What `ccl` says when a rank does something else, does not come, or is gone; and that it leaves nothing behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
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
            leave(group)
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
    skip_unless_possible(transport)
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


def skip_unless_possible(transport):
    if transport == "read" and run_ranks(2, transport_job) == ["shm", "shm"]:
        pytest.skip("the kernel does not let ranks read each other's memory")


def test_a_rank_that_leaves_is_named_at_once():
    text = run_ranks(2, left_job)[1]
    assert text.startswith("rank 0 has left the group, where rank 1 waits for it in an all-reduce (sum) of 3 float32")


def leave(group):
    """As destroy_process_group does, which only all ranks together may call."""
    group._get_backend(torch.device("cpu")).shutdown()


def text_of(call):
    """As `raised_by`, for a rank alone."""
    try:
        call()
    except torch_dist.DistError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def stopped(process):
    """No thread of `process` runs meanwhile."""
    os.kill(process, signal.SIGSTOP)
    try:
        tasks = [path / "stat" for path in Path(f"/proc/{process}/task").iterdir()]
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in tasks):
            os.sched_yield()
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def processes():
    found = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(found, os.getpid())
    return found


def over_job(transport, numel, ends):
    """Rank 0 stands still while rank 1 takes the message, and then leaves, or the timeout passes."""
    rank, process, tensor = torch_dist.get_rank(), processes()[0], torch.ones(numel)
    is_late = ends == "late"
    with ccl_group(transport, timedelta(seconds=1 if is_late else 60)) as group:
        if rank == 0:
            work = torch_dist.isend(tensor, group=group, group_dst=1)
        torch_dist.barrier()
        if rank == 1:
            with stopped(process):
                torch_dist.recv(tensor.zero_(), group=group, group_src=0)
                if not is_late:
                    leave(group)
                time.sleep(1.1 if is_late else 0.2)  # longer than a rank sleeps before it looks at its peers
        torch_dist.barrier()
        return raised_by(work.wait if rank == 0 else lambda: None), tensor.tolist()


@pytest.mark.parametrize("ends", ["left", "late"])
@pytest.mark.parametrize(("transport", "length"), [("read", 3), ("read", 0), ("shm", 0)])
def test_a_message_that_was_taken_is_sent_though_its_sender_looks_late(transport, length, ends):
    skip_unless_possible(transport)
    assert run_ranks(2, over_job, transport, length, ends) == [("", [1.0] * length)] * 2


def filled_job():
    """Rank 2 has rank 1 grant the message and then stand still, while rank 0 fills the shared memory and leaves."""
    rank, (sender, receiver, _), token = torch_dist.get_rank(), processes(), torch.zeros(1)
    with ccl_group("shm", ranks=[0, 1]) as group:
        message = torch.full((3,), 1.0 - rank)
        if rank == 0:
            work = torch_dist.isend(message, group=group, group_dst=1)
        torch_dist.barrier()
        if rank == 0:
            torch_dist.recv(token, 2)
            waited = text_of(lambda: work.wait(timedelta(seconds=0.2)))
            leave(group)
            message.fill_(7)
            torch_dist.send(token, 2)
            assert waited.startswith("wait(): the work is not over"), waited
        if rank == 1:
            torch_dist.recv(token, 2)
            work = torch_dist.irecv(message, group=group, group_src=0)
            torch_dist.send(token, 2)
        if rank == 2:
            with contextlib.ExitStack() as stack:
                with stopped(sender):
                    torch_dist.send(token, 1)
                    torch_dist.recv(token, 1)
                    stack.enter_context(stopped(receiver))
                torch_dist.send(token, 0)
                torch_dist.recv(token, 0)
                time.sleep(0.2)  # longer than a rank sleeps before it looks at its peers
        return raised_by(work.wait if rank < 2 else lambda: None), message.tolist()


def test_a_message_in_shared_memory_arrives_though_its_sender_left():
    sent, received, _ = run_ranks(3, filled_job)
    assert sent[0] == ""
    assert received == ("", [1.0] * 3)


def unread_job(transport, numel):
    """Rank 0 leaves with a send that nobody has taken, and uses its tensor again."""
    rank, message = torch_dist.get_rank(), torch.ones(numel)
    with ccl_group(transport) as group:
        if rank == 0:
            torch_dist.send(message, group=group, group_dst=1)
            works = [torch_dist.isend(message, group=group, group_dst=1) for _ in range(3)]
            leave(group)
            texts = [text_of(work.wait) for work in works]
            message.fill_(7)
        else:
            torch_dist.recv(message, group=group, group_src=0)  # looks whether the peer is there, the next one may not
        torch_dist.barrier()
        if rank == 1:
            texts = [text_of(lambda: torch_dist.recv(message, group=group, group_src=0)) for _ in range(3)]
        return texts, message.tolist()


@pytest.mark.parametrize(("transport", "length"), [("read", 3), ("read", 0), ("shm", 3)])
def test_the_memory_of_a_rank_that_left_is_not_read(transport, length):
    skip_unless_possible(transport)
    (sent, _), (received, message) = run_ranks(2, unread_job, transport, length)
    start = f"rank 0 left the group before sending {4 * length} bytes with tag 0 to rank 1 was over"
    assert [text.partition(";")[0] for text in sent] == [start] * 3
    assert all("rank 0 has left the group, where rank 1 waits for it in receiving" in text for text in received)
    assert message == [1.0] * length


def reading_job():
    """Rank 1 reads for a while from rank 0, which leaves meanwhile and uses its tensor again."""
    rank = torch_dist.get_rank()
    own = torch.ones([1 << 24, 1][rank])
    with ccl_group("read") as group:
        parts = [own, torch.zeros(1)] if rank == 0 else [torch.zeros(1 << 24), own]
        work = torch_dist.all_gather(parts, own, group=group, async_op=True)
        if rank == 0:
            while parts[1].item() == 0:
                os.sched_yield()
            leave(group)
        text = text_of(work.wait)
        if rank == 0:
            own[-1000:] = 7
        torch_dist.barrier()
        return text, bool((parts[0][-1000:] == 1).all())


def test_a_collective_does_not_read_what_a_rank_that_left_wrote_later():
    skip_unless_possible("read")
    for _ in range(3):
        (given, _), (taken, is_whole) = run_ranks(2, reading_job)
        if given == "":
            assert (taken, is_whole) == ("", True)
        else:
            assert given == "rank 0 left the group before an all-gather of float32 was over"
            assert taken.startswith("rank 0 has left the group, where rank 1 waits for it in an all-gather of float32")


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
