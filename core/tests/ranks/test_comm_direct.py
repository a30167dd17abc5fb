"""Exchanges by reading each other's memory: when they are taken, and what is said when a rank does not come."""

import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import Piece, direct
from deepspeed.comm.peer_memory import is_supported
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.torch_backend import TorchBackend
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux on x86-64")

WHOLE = [Piece(0, 1000, 0)]
NO_PROCESS = 2**22 + 1  # more than Linux counts


def connected():
    return direct.connect(torch.distributed.group.WORLD, StagingPool(1 << 20))


def connect_job(unwilling):
    if dist.get_rank() in unwilling:
        os.environ["DS_COMM_DIRECT"] = "0"
    return connected() is not None


def stranger_job():
    """Rank 1 gives the number of another process: as of one on another machine, its board is not found there."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "getpid", os.getppid)
        return connected() is not None


def board_job():
    """What a peer sees of a board: not yet announced, announced, in the midst of being written, the slot's next one."""
    queue = connected()
    peer = direct._Peer(0, os.getpid(), queue.board.address)
    number = queue._first
    assert peer.address_of(number) is None
    queue.board.announce(number, 4096)
    assert peer.address_of(number) == 4096
    queue.board._words[2 + 3 * (number % direct._NUM_SLOTS) + 1] = 8192
    assert peer.address_of(number) is None
    queue.board.announce(number + direct._NUM_SLOTS, 4096)
    assert peer.address_of(number) is None
    assert not peer.is_done(number)
    queue.board.set_done(number + 1)
    assert peer.is_done(number)
    return True


def more_than_slots_job():
    """Nobody waits for 600 exchanges; the board has 256 places."""
    backend = TorchBackend("gloo")
    flats = [torch.full((100,), float(i)) for i in range(600)]
    works = [
        backend.reduce(flat) if i % 3 else backend.reduce_to_owners(flat, [Piece(0, 100, 0)])
        for i, flat in enumerate(flats)
    ]
    for work in reversed(works):
        work.wait()
    owned = [i for i in range(600) if i % 3 or dist.get_rank() == 0]
    return all((flats[i] == 2.0 * i).all() for i in owned)


def late_job():
    """Rank 1 never begins the second exchange."""
    queue = connected()
    flat = torch.ones(1000)
    queue.reduce_to_owners(flat, WHOLE).wait()
    if dist.get_rank() == 0:
        queue._timeout_s = 0.0
        work = queue.gather_from_owners(flat, WHOLE)
        with pytest.raises(CommError) as caught:
            work.wait()
        message = str(caught.value)
    dist.barrier()
    return message if dist.get_rank() == 0 else None


def gone_job():
    """Rank 0 wants to read from a process that is no more (`test_dead_rank.py` kills one)."""
    queue = connected()
    if dist.get_rank() == 0:
        queue.peers[1]._process = NO_PROCESS
        with pytest.raises(CommError, match=rf"^rank 1 \(process {NO_PROCESS}\) ended before an exchange"):
            queue.reduce_to_owners(torch.ones(1000), WHOLE)
    dist.barrier()
    return True


def ended_reader_job():
    """A rank that has read, and ended before its peer looked, has read."""
    queue = connected()
    flat = torch.ones(1000)
    work = queue.gather_from_owners(flat, WHOLE)
    if dist.get_rank() == 0:
        queue.peers[1]._process = NO_PROCESS
    work.wait()
    dist.barrier()
    return True


def losses_job(path, stage):
    os.environ["DS_COMM_DIRECT"] = "1" if path == "direct" else "0"
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, sequence_length=16, num_layers=2, num_heads=2, width=32))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(64, (6, 2, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for batch in tokens:
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    used = [member._direct is not None for member in engine.sharding.backend._members.values()]
    assert used == [path == "direct"]
    return losses


@pytest.mark.parametrize(("unwilling", "expected"), [((), True), ((1,), False), ((0, 1), False)])
def test_all_ranks_take_the_same_way(unwilling, expected):
    assert run_ranks(2, connect_job, unwilling) == [expected] * 2


def test_another_process_is_not_taken_for_a_rank():
    assert run_ranks(2, stranger_job) == [False, False]


def test_what_a_peer_sees_of_a_board():
    assert run_ranks(1, board_job) == [True]


def test_more_exchanges_than_places_on_the_board():
    assert run_ranks(2, more_than_slots_job) == [True, True]


def test_a_rank_that_does_not_come_is_named():
    message = run_ranks(2, late_job)[0]
    assert "waited 0 s" in message
    assert "exchange 2 of this group; ranks [1]" in message


def test_a_rank_that_is_gone_is_named():
    assert run_ranks(2, gone_job) == [True, True]


def test_a_reader_that_has_ended_needs_nothing():
    assert run_ranks(2, ended_reader_job) == [True, True]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_losses_do_not_depend_on_the_way(stage):
    assert run_ranks(2, losses_job, "direct", stage) == run_ranks(2, losses_job, "messages", stage)
