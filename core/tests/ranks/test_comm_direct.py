"""Exchanges by reading each other's memory: when they are taken, and what is said when a rank does not come."""

import os

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import Piece, boards, direct
from deepspeed.comm.staging import StagingPool
from deepspeed.comm.torch_backend import TorchBackend
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("direct")

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
    peer = boards.Peer(0, os.getpid(), queue.board.address)
    number = queue._first
    slot = boards._slot(number)
    assert peer.announced(number) is None
    queue.board.announce(number, 4096, 7)
    assert peer.announced(number) == (4096, 7)
    for word in (1, 2, 3):
        queue.board._words[slot + word] += 1
        assert peer.announced(number) is None
        queue.board._words[slot + word] -= 1
    queue.board.announce(number + boards.NUM_SLOTS, 4096, 7)
    assert peer.announced(number) is None
    assert not peer.is_done(number)
    queue.board._words[0] = number
    assert not peer.is_done(number)
    queue.board.set_done(number + 1)
    assert peer.is_done(number)
    return True


def reuse_job(kind):
    """Rank 1 waits until rank 0 has read, which begins later; then it may write what it likes."""
    queue, rank = connected(), dist.get_rank()
    flat = torch.full((1000,), rank + 1.0)
    exchange = {
        "to owners": lambda: queue.reduce_to_owners(flat, WHOLE),
        "from owners": lambda: queue.gather_from_owners(flat, [Piece(0, 1000, 1)]),
        "reduce": lambda: queue.reduce(flat),
    }[kind]
    if rank == 1:
        work = exchange()
        assert not work._is_over()  # rank 0 has not begun, and cannot have read
        dist.barrier()
    else:
        dist.barrier()
        work = exchange()
    work.wait()
    read = flat.clone()
    if rank == 1:
        flat.fill_(torch.nan)
    return read.unique().tolist()


def finish_job():
    """`finish` ends when peers have read, not when this rank has nothing left to read."""
    queue, rank = connected(), dist.get_rank()
    flat = torch.full((1000,), rank + 1.0)
    if rank == 1:
        queue.reduce_to_owners(flat, WHOLE)
        dist.barrier()
        queue.finish()
        return queue.peers[0]._done == queue._next - 1
    dist.barrier()
    queue.reduce_to_owners(flat, WHOLE).wait()
    return bool((flat == 3).all())


def crossed_groups_job():
    """Rank 0 waits in the second group, and must go on with the first, for which rank 1 waits."""
    first, second, rank = connected(), connected(), dist.get_rank()
    x, y = torch.ones(1000), torch.ones(1000)
    if rank == 0:
        work = first.reduce(x)
        dist.barrier()
        second.reduce(y).wait()
        work.wait()
    else:
        dist.barrier()
        first.reduce(x).wait()
        second.reduce(y).wait()
    return bool((x == 2).all() and (y == 2).all())


def mismatch_job(numel, dtype, kind):
    """Rank 1 makes another exchange than rank 0, which says so, and says so again, and can leave the group."""
    backend = TorchBackend("gloo")
    backend.connect()
    if dist.get_rank() == 1:
        flat = torch.zeros(numel, dtype=dtype)
        (backend.gather_from_owners if kind == "copy" else backend.reduce_to_owners)(flat, [Piece(0, numel, 0)])
        dist.barrier()
        return None
    dist.barrier()
    flat = torch.zeros(1000)
    messages = []
    for _ in range(2):
        with pytest.raises(CommError) as caught:
            backend.reduce_to_owners(flat, WHOLE)
        messages.append(str(caught.value))
    backend.release()
    assert messages[0] == messages[1]
    return messages[0]


def interrupted_job():
    """Half a sum is in the buffer: it is not begun again."""
    queue = connected()
    flat = torch.ones(3 * direct._READ_NUMEL)
    if dist.get_rank() == 0:
        reads = []

        def interrupt_the_second(own, others, rank, add=direct.add_in_rank_order):
            reads.append(1)
            if len(reads) == 2:
                raise KeyboardInterrupt
            add(own, others, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "add_in_rank_order", interrupt_the_second)
            with pytest.raises(KeyboardInterrupt):
                queue.reduce_to_owners(flat, [Piece(0, flat.numel(), 0)]).wait()
        with pytest.raises(CommError, match="an exchange was broken off: KeyboardInterrupt"):
            queue.gather_from_owners(flat, [Piece(0, flat.numel(), 0)])
    else:
        queue.reduce_to_owners(flat, [Piece(0, flat.numel(), 0)]).wait()  # rank 0 will not read any more
    return True


def subgroup_message_job():
    """Errors name ranks of the job, not of the group."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        queue = direct.connect(group, StagingPool(1 << 20))
        (peer,) = queue.peers.values()
        return peer.rank
    return None


def more_than_slots_job():
    """Nobody waits for 600 exchanges; the board has 256 places. Every fifth has no piece for some ranks."""
    backend, world_size = TorchBackend("gloo"), dist.get_world_size()
    flats = [torch.full((100 if i % 5 else 1,), float(i)) for i in range(600)]
    works = [
        backend.reduce(flat) if i % 3 else backend.reduce_to_owners(flat, [Piece(0, flat.numel(), 0)])
        for i, flat in enumerate(flats)
    ]
    for work in reversed(works):
        work.wait()
    owned = [i for i in range(600) if i % 3 or dist.get_rank() == 0]
    return all((flats[i] == world_size * i).all() for i in owned)


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
        queue.finish()  # does not wait again
    dist.barrier()
    if dist.get_rank() == 1:
        assert queue.peers[0].is_done(queue._next)  # nobody waits for a rank that has given up
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


@pytest.mark.parametrize(("kind", "expected"), [("to owners", [3.0]), ("from owners", [2.0]), ("reduce", [3.0])])
def test_a_buffer_is_free_when_it_was_read(kind, expected):
    first, second = run_ranks(2, reuse_job, kind)
    assert first == expected
    assert second == ([2.0] if kind == "to owners" else expected)


def test_finish_waits_for_the_readers():
    assert run_ranks(2, finish_job) == [True, True]


def test_a_wait_in_one_group_goes_on_with_the_other():
    assert run_ranks(2, crossed_groups_job) == [True, True]


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_exchanges_than_places_on_the_board(world_size):
    assert run_ranks(world_size, more_than_slots_job) == [True] * world_size


@pytest.mark.parametrize(
    ("numel", "dtype", "kind", "said"),
    [
        (999, torch.float32, "sum", "a sum of 999 float32"),
        (1000, torch.bfloat16, "sum", "a sum of 1000 bfloat16"),
        (1000, torch.float32, "copy", "a copy of 1000 float32"),
    ],
)
def test_ranks_that_exchange_different_things(numel, dtype, kind, said):
    message = run_ranks(2, mismatch_job, numel, dtype, kind)[0]
    assert message.startswith(f"rank 0 makes a sum of 1000 float32 where rank 1 makes {said}; all ranks")


def test_a_sum_that_was_interrupted_is_not_begun_again():
    assert run_ranks(2, interrupted_job) == [True, True]


def test_errors_name_ranks_of_the_job():
    assert run_ranks(4, subgroup_message_job) == [None, 3, None, 1]


def test_a_rank_that_does_not_come_is_named():
    message = run_ranks(2, late_job)[0]
    assert "waited 0 s" in message
    assert "in an exchange to whose end ranks [1] have not come" in message


def test_a_rank_that_is_gone_is_named():
    assert run_ranks(2, gone_job) == [True, True]


def test_a_reader_that_has_ended_needs_nothing():
    assert run_ranks(2, ended_reader_job) == [True, True]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_losses_do_not_depend_on_the_way(stage):
    assert run_ranks(2, losses_job, "direct", stage) == run_ranks(2, losses_job, "messages", stage)
