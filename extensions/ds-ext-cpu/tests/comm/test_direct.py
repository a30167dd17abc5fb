"""Collectives by reading each other's memory: when they are taken, and what is said when a rank does not come."""

import os
import threading
from types import SimpleNamespace

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import parted
from deepspeed.comm.transports import StagingPool
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import GPT, GPTConfig
from ds_ext_cpu.comm import boards, direct, readings, waiting

pytestmark = pytest.mark.usefixtures("direct")

NO_PROCESS = 2**22 + 1  # more than Linux counts


def connected():
    return direct.connect(torch.distributed.group.WORLD, StagingPool(1 << 20))


def connect_job(unwilling):
    if dist.get_rank() in unwilling:
        os.environ["DS_COMM_DIRECT"] = "0"
    return connected() is not None


def misspelt_job():
    os.environ["DS_COMM_DIRECT"] = "off\x1b[31m"
    with pytest.raises(CommError) as caught:
        connected()
    return str(caught.value)


def test_a_word_that_is_neither_0_nor_1_is_refused():
    for told in run_ranks(2, misspelt_job):
        assert told.startswith("DS_COMM_DIRECT='off")
        assert told.endswith(": 0 (ranks send messages) or 1 (they read each other's memory) is expected")
        assert told.isprintable()


def long_pause_job():
    os.environ["DS_COMM_PAUSE"] = "2"
    with pytest.raises(CommError) as caught:
        connected()
    return str(caught.value)


def test_a_pause_that_is_no_share_of_a_wait_is_refused():
    for told in run_ranks(2, long_pause_job):
        assert told.startswith("DS_COMM_PAUSE=2: a number from 0 to 1 is expected")


class Idle:
    def go_on(self):
        pass


@pytest.mark.parametrize(("pause", "num_looks"), [("", 53), ("0.5", 3)])
def test_a_rank_looks_often_before_it_pauses_unless_it_shares_its_core(monkeypatch, pause, num_looks):
    monkeypatch.setenv("DS_COMM_PAUSE", pause)
    clock, slept, looks = iter(range(100)), [], []
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(clock) / 1e3, sleep=slept.append))

    def is_over():
        looks.append(True)
        return len(slept) == 2

    waiting.wait_until(Idle(), is_over, 1.0, AssertionError, AssertionError, parted.Wait("", "", 0, ()))
    assert len(looks) == num_looks
    assert slept == pytest.approx([0.5e-3, 1e-3] if pause else [50e-6, 50e-6])


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
    queue.board.announce(number, 4096, (7, 8))
    assert peer.announced(number) == (4096, (7, 8))
    for word in (1, 2, 3, 4):
        queue.board._words[slot + word] += 1
        assert peer.announced(number) is None
        queue.board._words[slot + word] -= 1
    queue.board.announce(number + boards.NUM_SLOTS, 4096, (7, 8))
    assert peer.announced(number) is None
    assert not peer.is_done(number)
    queue.board._words[0] = number
    assert not peer.is_done(number)
    queue.board.set_done(number + 1)
    assert peer.is_done(number)
    queue.board.leave(number + 1, number + (1 << boards.EPOCH_BITS))
    assert peer.is_done(number + 1)
    with pytest.raises(boards.PeerLeft):
        peer.is_done(number + 2)
    queue.board.leave(number + 3 + (1 << boards.EPOCH_BITS), number + (2 << boards.EPOCH_BITS))
    assert peer.is_done(number + 1)  # a slow peer, which looks for the end of a step before both failures
    with pytest.raises(boards.PeerLeft):
        peer.is_done(number + 2)
    return True


def reuse_job(kind):
    """Rank 1 waits until rank 0 has read, which begins later; then it may write what it likes."""
    queue, rank = connected(), dist.get_rank()
    flat, shard = torch.full((1000,), rank + 1.0), torch.empty(500)
    collective = {
        "reduce_scatter": lambda: queue.reduce_scatter(shard, flat, ""),
        "broadcast": lambda: queue.broadcast(flat, 1, ""),
        "all_reduce": lambda: queue.all_reduce(flat, ""),
    }[kind]
    if rank == 1:
        work = collective()
        assert not work._is_over()  # rank 0 has not begun, and cannot have read
        dist.barrier()
    else:
        dist.barrier()
        work = collective()
    work.wait()
    read = (shard if kind == "reduce_scatter" else flat).clone()
    if rank == 1:
        flat.fill_(torch.nan)
    return read.unique().tolist()


def crossed_groups_job():
    """Rank 0 waits in the second group, and must go on with the first, for which rank 1 waits."""
    first, second, rank = connected(), connected(), dist.get_rank()
    x, y = torch.ones(1000), torch.ones(1000)
    if rank == 0:
        work = first.all_reduce(x, "")
        dist.barrier()
        second.all_reduce(y, "").wait()
        work.wait()
    else:
        dist.barrier()
        first.all_reduce(x, "").wait()
        second.all_reduce(y, "").wait()
    return bool((x == 2).all() and (y == 2).all())


def threads_job():
    """A thread with a group of its own each. They start together, on every rank."""
    world_size = dist.get_world_size()
    backends = [dist.group_backend(dist.new_group(range(world_size))) for _ in range(3)]
    for backend in backends:
        backend.connect()
    start, wrong = threading.Barrier(len(backends)), []

    def train(place, backend):
        start.wait()
        try:
            for number in range(300):
                flat = torch.full((64,), float(place + number))
                backend.all_reduce(flat).wait()
                if not (flat == world_size * (place + number)).all():
                    wrong.append((place, number))
        except CommError as error:
            wrong.append((place, repr(error)))

    threads = [threading.Thread(target=train, args=item) for item in enumerate(backends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def crossed_threads_job():
    """Rank 0 issues in the second group when it waits in the first, and rank 1 the other way round."""
    queues, flats = [connected(), connected()], [torch.ones(1000), torch.ones(1000)]
    is_issued, rank = threading.Event(), dist.get_rank()

    def run(place):
        if place != rank:
            is_issued.wait()
        work = queues[place].all_reduce(flats[place], "")
        is_issued.set()
        work.wait()

    thread = threading.Thread(target=run, args=(1,))
    thread.start()
    run(0)
    thread.join()
    return bool((flats[0] == 2).all() and (flats[1] == 2).all())


def other_groups_failure_job():
    """Rank 0 comes upon a mismatch in the first group when it waits in the second, which goes on."""
    first, second, rank = connected(), connected(), dist.get_rank()
    flat, other = torch.ones(1000 - rank), torch.ones(10)
    if rank == 0:
        work = first.broadcast(flat, 1, "")
        dist.barrier()
        second.all_reduce(other, "").wait()
        with pytest.raises(CommError, match="rank 0 makes a broadcast from rank 1 of the group of 1000 float32"):
            work.wait()
    else:
        dist.barrier()
        with pytest.raises(CommError, match="rank 0 makes a broadcast from rank 1 of the group of 1000 float32"):
            first.all_reduce(flat, "").wait()
        second.all_reduce(other, "").wait()
    return bool((other == 2).all())


def mismatch_job(numel, dtype, kind):
    """Rank 1 makes another collective than rank 0. Both say so, and say so again; once they gave it up they go on."""
    queue = connected()
    numel, dtype, kind = (1000, torch.float32, "all_reduce") if dist.get_rank() == 0 else (numel, dtype, kind)
    flat, messages = torch.zeros(numel, dtype=dtype), []
    for _ in range(2):
        with pytest.raises(CommError) as caught:
            (queue.broadcast(flat, 0, "") if kind == "broadcast" else queue.all_reduce(flat, "")).wait()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    dist.barrier()  # a rank that goes on at once announces its next collective where its peer looks for this one
    queue.abandon([], failed=True)
    ones = torch.ones(1000)
    queue.all_reduce(ones, "").wait()
    assert (ones == 2).all()
    return messages[0]


def interrupted_job():
    """Half a sum is in the buffer: it is not begun again."""
    queue = connected()
    flat, shard = torch.ones(6 * readings.READ_NUMEL), torch.empty(3 * readings.READ_NUMEL)
    if dist.get_rank() == 0:
        reads = []

        def interrupt_the_second(own, others, rank, add=readings.add_in_rank_order):
            reads.append(1)
            if len(reads) == 2:
                raise KeyboardInterrupt
            add(own, others, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(readings, "add_in_rank_order", interrupt_the_second)
            with pytest.raises(KeyboardInterrupt):
                queue.reduce_scatter(shard, flat, "").wait()
        with pytest.raises(CommError, match="a collective was interrupted: KeyboardInterrupt"):
            queue.broadcast(flat, 0, "")
    else:
        with pytest.raises(CommError, match="^rank 0 left a collective of this group unfinished"):
            queue.reduce_scatter(shard, flat, "").wait()
    return True


def gone_announcement_job():
    """Rank 0 has read what it needs and fails; its next collective takes the slot before rank 1 has looked."""
    queue, rank = connected(), dist.get_rank()
    store, name = torch.distributed.distributed_c10d._get_default_store(), f"gone/{queue._next}"
    full, shard, ones = torch.ones(1000), torch.empty(500), torch.ones(1000)
    # they meet in the store: a barrier goes on with the collectives, and rank 1 is not to look meanwhile
    if rank == 1:
        work = queue.reduce_scatter(shard, full, "")
        store.set(f"{name}/announced", "")
        store.wait([f"{name}/gone"])
        with pytest.raises(boards.PeerLeft):
            work.wait()
        queue.abandon([], failed=True)
    else:
        store.wait([f"{name}/announced"])
        work = queue.reduce_scatter(shard, full, "")
        assert queue.done == work.number
        queue.abandon([work], failed=True)
    work = queue.all_reduce(ones, "")
    if rank == 0:
        store.set(f"{name}/gone", "")
    work.wait()
    return bool((ones == 2).all())


def subgroup_message_job():
    """Errors name ranks of the job, not of the group."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        queue = direct.connect(group, StagingPool(1 << 20))
        (peer,) = queue.peers.values()
        return peer.rank
    return None


def late_job():
    """Rank 1 never begins the second collective."""
    queue = connected()
    flat = torch.ones(1000)
    queue.all_reduce(flat, "").wait()
    if dist.get_rank() == 0:
        queue._timeout_s = 0.0
        work = queue.broadcast(flat, 0, "")
        with pytest.raises(CommError) as caught:
            work.wait()
        message = str(caught.value)
        queue.abandon([], failed=True)
        queue._timeout_s = 60.0
    dist.barrier()
    if dist.get_rank() == 1:
        queue.broadcast(flat, 0, "").wait()  # rank 0 announced it before it gave up
        with pytest.raises(boards.PeerLeft, match="rank 0 failed with CommError: rank 0 waited 0 s"):
            queue.all_reduce(flat, "").wait()
        queue.abandon([], failed=True)
    ones = torch.ones(1000)
    queue.all_reduce(ones, "").wait()
    assert (ones == 2).all()
    return message if dist.get_rank() == 0 else None


def gone_job():
    """Rank 0 wants to read from a process that is no more (`test_dead_rank.py` kills one)."""
    queue = connected()
    if dist.get_rank() == 0:
        queue.peers[1]._process = NO_PROCESS
        with pytest.raises(CommError, match=rf"^rank 1 \(process {NO_PROCESS}\) ended before a collective"):
            queue.all_reduce(torch.ones(1000), "")
    dist.barrier()
    return True


def ended_reader_job():
    """A rank that has read, and ended before its peer looked, has read."""
    queue = connected()
    flat = torch.ones(1000)
    work = queue.broadcast(flat, 0, "")
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
    assert engine.sharding.backend.is_direct is (path == "direct")
    return losses


@pytest.mark.parametrize(("unwilling", "expected"), [((), True), ((1,), False), ((0, 1), False)])
def test_all_ranks_take_the_same_way(unwilling, expected):
    assert run_ranks(2, connect_job, unwilling) == [expected] * 2


def test_another_process_is_not_taken_for_a_rank():
    assert run_ranks(2, stranger_job) == [False, False]


def test_what_a_peer_sees_of_a_board():
    assert run_ranks(1, board_job) == [True]


@pytest.mark.parametrize(("kind", "expected"), [("reduce_scatter", [3.0]), ("broadcast", [2.0]), ("all_reduce", [3.0])])
def test_a_buffer_is_free_when_it_was_read(kind, expected):
    assert run_ranks(2, reuse_job, kind) == [expected, expected]


def test_a_wait_in_one_group_goes_on_with_the_other():
    assert run_ranks(2, crossed_groups_job) == [True, True]


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_with_a_group_each(world_size):
    assert run_ranks(world_size, threads_job, timeout_s=60) == [[]] * world_size


def test_threads_that_wait_in_opposite_orders():
    assert run_ranks(2, crossed_threads_job, timeout_s=60) == [True, True]


def test_a_failure_is_raised_to_the_callers_of_its_group():
    assert run_ranks(2, other_groups_failure_job) == [True, True]


@pytest.mark.parametrize(
    ("elements", "dtype", "kind", "said"),
    [
        (999, torch.float32, "all_reduce", "an all-reduce of 999 float32"),
        (1000, torch.bfloat16, "all_reduce", "an all-reduce of 1000 bfloat16"),
        (1000, torch.float32, "broadcast", "a broadcast from rank 0 of the group of 1000 float32"),
    ],
)
def test_ranks_that_make_different_collectives(elements, dtype, kind, said):
    first, second = run_ranks(2, mismatch_job, elements, dtype, kind)
    assert first.startswith(f"rank 0 makes an all-reduce of 1000 float32 where rank 1 makes {said}; all ranks")
    assert second.startswith(f"rank 1 makes {said} where rank 0 makes an all-reduce of 1000 float32; all ranks")


def test_a_sum_that_was_interrupted_is_not_begun_again():
    assert run_ranks(2, interrupted_job) == [True, True]


def test_a_rank_that_left_announces_nothing_any_more():
    assert run_ranks(2, gone_announcement_job, timeout_s=30) == [True, True]


def test_errors_name_ranks_of_the_job():
    assert run_ranks(4, subgroup_message_job) == [None, 3, None, 1]


def test_a_rank_that_does_not_come_is_named():
    message = run_ranks(2, late_job)[0]
    assert "waited 0 s" in message
    assert "in a collective to whose end ranks [1] have not come" in message


def test_a_rank_that_is_gone_is_named():
    assert run_ranks(2, gone_job) == [True, True]


def test_a_reader_that_has_ended_needs_nothing():
    assert run_ranks(2, ended_reader_job) == [True, True]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_losses_do_not_depend_on_the_way(stage):
    assert run_ranks(2, losses_job, "direct", stage) == run_ranks(2, losses_job, "messages", stage)


def test_the_text_of_a_collective_is_cut_for_the_board():
    long = boards.What("ä" * 300)
    peer = boards.Peer(0, os.getpid(), 0)
    assert 100 < len(peer.text(long.address)) <= 128
