"""Messages between two ranks that read each other's memory: order, many under way, and peers that fail."""

import os
import signal

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.point_to_point import PointToPoint
from deepspeed.errors import CommError
from deepspeed.testing.distributed import RankError, run_ranks
from ds_ext_cpu.comm import direct_messages
from ds_ext_cpu.comm.direct_messages import DirectMessages

pytestmark = pytest.mark.usefixtures("direct")

MANY = 3 * direct_messages._NUM_SLOTS


def connected():
    peers = PointToPoint(torch.distributed.group.WORLD)
    peers.connect()
    assert isinstance(peers._host, DirectMessages)
    return peers


def many_job():
    """More messages than slots, of changing sizes and dtypes, on two tags; every rank sends before it receives."""
    peers, rank, world_size = connected(), dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    shapes = [((n % 5) + 1, 7) for n in range(MANY)]

    def value(sender, n):
        return torch.full(shapes[n], float(sender + n)).to(dtypes[n % 4])

    sent = [(tensor, peers.send(tensor, after, tag=n % 2)) for n in range(MANY) for tensor in [value(rank, n)]]
    received = [torch.empty(shapes[n], dtype=dtypes[n % 4]) for n in range(MANY)]
    works = [peers.receive(tensor, before, tag=n % 2) for n, tensor in enumerate(received)]
    for _, work in sent:  # sends first: waiting for one goes on with the receives
        work.wait()
    for n, work in enumerate(works):
        work.wait()
        assert torch.equal(received[n], value(before, n)), n
    assert all(work.poll() for work in works)
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_messages_arrive_in_order(world_size):
    run_ranks(world_size, many_job)


def between_collectives_job():
    """A rank that waits for a message goes on with the collectives of other groups, and the other way around."""
    peers, rank = connected(), dist.get_rank()
    backend = dist.group_backend()
    backend.connect()
    full, message = torch.ones(1000), torch.full((500,), float(rank))
    work = backend.all_reduce(full)
    if rank == 0:
        peers.send(message, 1).wait()  # rank 1 waits for the sum first, which needs rank 0
        work.wait()
    else:
        receive = peers.receive(message, 0)
        work.wait()
        receive.wait()
        assert message.eq(0).all()
    assert full.eq(2).all()


def test_a_wait_goes_on_with_collectives():
    run_ranks(2, between_collectives_job)


def mismatch_job():
    peers, rank = connected(), dist.get_rank()
    if rank == 0:
        sent = peers.send(torch.ones(4), 1)
        with pytest.raises(PeerFailed, match=r"rank 0 cannot finish a send to rank 1 \(a message of 4 float32\)"):
            sent.wait()
        peers.abandon()
        peers.send(torch.ones(1), 1).wait()
        return 1.0
    receive = peers.receive(torch.empty(5), 0)
    with pytest.raises(CommError, match="rank 1 expects a message of 5 float32 from rank 0, which sends a"):
        receive.wait()
    peers.abandon()
    with pytest.raises(CommError, match="left messages"):
        receive.wait()
    message = torch.zeros(1)
    peers.receive(message, 0).wait()
    return message.item()


def test_other_shapes_are_named_on_both_ranks_which_then_go_on():
    assert run_ranks(2, mismatch_job) == [1.0, 1.0]


def failure_job():
    """Rank 2 fails; rank 1 waits for it, and rank 0 for rank 1."""
    peers, rank = connected(), dist.get_rank()
    try:
        if rank == 2:
            raise ValueError("no such layer")
        peers.receive(torch.empty(3), rank + 1).wait()
    except (ValueError, CommError) as error:
        peers.abandon()
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_fails_is_named_by_all():
    found = run_ranks(3, failure_job)
    assert found[2] == "ValueError: no such layer"
    for text in found[:2]:
        assert text.startswith("PeerFailed")
        assert "rank 2 failed with ValueError: no such layer" in text


def killed_job(folder):
    peers, rank = connected(), dist.get_rank()
    if rank == 1:
        with open(f"{folder}/pid", "w") as file:
            file.write(str(os.getpid()))
        peers.receive(torch.empty(1), 0).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    peers.send(torch.ones(1), 1).wait()
    with pytest.raises(CommError, match=r"rank 1 \(process \d+\) ended before a collective or message"):
        peers.receive(torch.empty(1), 1).wait()
    with open(f"{folder}/said", "w"):
        pass


def test_a_killed_sender_is_named(tmp_path, monkeypatch):
    # rank 0 ends by itself; the pool would kill it 2 s after its peer, which a loaded machine may need to see that
    monkeypatch.setattr("deepspeed.testing.distributed._GRACE_S", 60.0)
    with pytest.raises(RankError, match="killed by SIGKILL") as caught:
        run_ranks(2, killed_job, str(tmp_path))
    assert (tmp_path / "said").exists(), str(caught.value)


def late_job():
    peers = PointToPoint(torch.distributed.new_group())
    peers.connect()  # within an ordinary group's timeout
    peers._host._timeout_s = 0.2
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=r"waited 0.2 s, the group's timeout, in a receive from rank 1"):
            peers.receive(torch.empty(2), 1).wait()


def test_a_message_that_nobody_sends_ends_at_the_timeout():
    run_ranks(2, late_job)


def off_job():
    os.environ["DS_COMM_DIRECT"] = "0"
    peers = PointToPoint(torch.distributed.group.WORLD)
    peers.connect()
    assert peers._host is None
    rank, found = dist.get_rank(), torch.empty(3)
    sent = peers.send(torch.full((3,), float(rank)), 1 - rank)
    peers.receive(found, 1 - rank).wait()
    sent.wait()
    assert found.eq(1 - rank).all()


def test_without_reading_messages_go_over_gloo():
    run_ranks(2, off_job)
