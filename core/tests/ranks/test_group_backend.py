"""The collectives of one process group, against plain torch: by the core, and by both transports of ds-ext-cpu."""

import os
from datetime import timedelta

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.torch_group import forget
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

SHARD = 150_001  # more than one block of what is read at a time, and no multiple of anything
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def backend_by(transport, group=None):
    """A new backend over this transport; the ranks' environment is put back after the job."""
    os.environ["DS_COMM_DIRECT"] = "1" if transport == "direct" else "0"
    forget()
    if transport == "plain":
        dist.init_deepspeed_backend("torch")
    backend = dist.group_backend(group)
    backend.connect()
    assert backend.world_size == 1 or getattr(backend, "is_direct", None) == {"direct": True, "messages": False}.get(
        transport
    )
    return backend


def values_of(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_of(world_size, numel, dtype):
    """In rank order, low precision in fp32 and rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return sum(values_of(rank, numel, dtype).to(wide) for rank in range(world_size)).to(dtype)


def primitives_job(transport):
    """Each primitive on each dtype; the names of those whose result is not plain torch's to the bit."""
    backend = backend_by(transport)
    world_size, rank = backend.world_size, backend.rank
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    wrong = []

    def expect(name, found, expected):
        if not torch.equal(found, expected):
            wrong.append((name, found.dtype))

    for dtype in DTYPES:
        numel = world_size * SHARD
        total = sum_of(world_size, numel, dtype)
        gathered = torch.cat([values_of(r, SHARD, dtype) for r in range(world_size)])

        full = values_of(rank, numel - 1, dtype)  # not a multiple of the world
        backend.all_reduce(full).wait()
        expected = sum_of(world_size, numel - 1, dtype)
        if transport == "plain" and world_size > 2:  # gloo adds in another order, in fp32 at least
            eps = torch.finfo(dtype).eps
            narrowest = min(eps, torch.finfo(torch.float32).eps)
            rtol = max(eps, world_size * narrowest)
            torch.testing.assert_close(full, expected, rtol=rtol, atol=4 * world_size * narrowest)
        else:
            expect("all_reduce", full, expected)

        for few in (1, 2):  # fewer than ranks
            full = torch.full((few,), rank + 1, dtype=dtype)
            backend.all_reduce(full).wait()
            expect("all_reduce of few", full, torch.full((few,), sum(range(1, world_size + 1)), dtype=dtype))

        full, shard = values_of(rank, numel, dtype), torch.empty(SHARD, dtype=dtype)
        backend.reduce_scatter(shard, full).wait()
        expect("reduce_scatter", shard, total[own])
        full = values_of(rank, numel, dtype)
        backend.reduce_scatter(full[own], full).wait()
        expect("reduce_scatter in place", full[own], total[own])

        full, shard = torch.empty(numel, dtype=dtype), values_of(rank, SHARD, dtype)
        backend.all_gather(full, shard).wait()
        expect("all_gather", full, gathered)
        full = torch.empty(numel, dtype=dtype)
        full[own] = values_of(rank, SHARD, dtype)
        backend.all_gather(full, full[own]).wait()
        expect("all_gather in place", full, gathered)

        tensor = values_of(rank, 1000, dtype)
        backend.broadcast(tensor, world_size - 1).wait()
        expect("broadcast", tensor, values_of(world_size - 1, 1000, dtype))

        tensor = torch.empty(numel, dtype=dtype)
        backend.all_to_all(tensor, values_of(rank, numel, dtype)).wait()
        expect("all_to_all", tensor, torch.cat([values_of(r, numel, dtype)[own] for r in range(world_size)]))
        # rank a sends 1000 * a + b elements to rank b
        inputs = [values_of(10 * rank + to, 1000 * rank + to, dtype) for to in range(world_size)]
        expected = [values_of(10 * r + rank, 1000 * r + rank, dtype) for r in range(world_size)]
        numels = [part.numel() for part in expected]
        tensor = torch.empty(sum(numels), dtype=dtype)
        backend.all_to_all(tensor, torch.cat(inputs), numels, [part.numel() for part in inputs]).wait()
        expect("uneven all_to_all", tensor, torch.cat(expected))
    backend.barrier()
    backend.release()
    assert backend.held_bytes == 0
    return wrong


def empty_job(transport):
    backend = backend_by(transport)
    nothing = torch.empty(0)
    for work in (
        backend.all_reduce(nothing),
        backend.reduce_scatter(nothing, nothing),
        backend.all_gather(nothing, nothing),
        backend.broadcast(nothing, 0),
    ):
        assert work.poll()
        work.wait()
    return True


def poll_job(transport):
    """A poll waits for nobody, and comes to True without a wait once the peers have issued the same."""
    backend, other = backend_by(transport), dist.new_group()
    full, shard = torch.ones(8 * backend.world_size), torch.empty(8)
    if backend.rank == 0:
        work = backend.reduce_scatter(shard, full)
        assert not work.poll()  # nobody else has issued it
    dist.barrier(other)
    if backend.rank != 0:
        work = backend.reduce_scatter(shard, full)
    while not work.poll():
        pass
    dist.barrier(other)
    work.wait()
    work.wait()
    return shard.unique().tolist()


def many_in_flight_job(transport):
    """600 collectives are issued without waiting, on a board of 256 slots; rank 0 issues all before the others do."""
    backend, other, world_size = backend_by(transport), dist.new_group(), dist.get_world_size()
    fulls = [torch.full((world_size,), float(i)) for i in range(600)]
    shards = [torch.empty(1) for _ in fulls]
    if backend.rank != 0:
        dist.barrier(other)
    works = [
        backend.all_reduce(full) if i % 3 else backend.reduce_scatter(shard, full)
        for i, (full, shard) in enumerate(zip(fulls, shards, strict=True))
    ]
    if backend.rank == 0:
        dist.barrier(other)
    for work in works[1::2] + works[::2]:
        work.wait()
    return all(
        (full if i % 3 else shard).eq(world_size * i).all()
        for i, (full, shard) in enumerate(zip(fulls, shards, strict=True))
    )


def groups_job(transport):
    """Two groups of one process have a backend each; ranks and sources are those within the group."""
    world = dist.get_world_size()
    pair, rest = dist.new_group([0, world - 1]), dist.new_group(range(1, world))
    told = []
    for group, members in ((pair, [0, world - 1]), (rest, list(range(1, world)))):
        if dist.get_rank() not in members:
            continue
        backend = backend_by(transport, group)
        assert backend is dist.group_backend(group)
        assert (backend.rank, backend.world_size) == (members.index(dist.get_rank()), len(members))
        tensor = torch.tensor([float(dist.get_rank())])
        backend.all_reduce(tensor).wait()
        assert tensor.item() == sum(members)
        tensor.fill_(dist.get_rank())
        backend.broadcast(tensor, 1).wait()
        told.append(int(tensor.item()))
    return told


def mismatch_job(first, second):
    """Rank 0 does `first`, the others `second`: what each is told."""
    backend = backend_by("direct")
    kind, argument, tag = first if backend.rank == 0 else second
    calls = {
        "all_reduce": lambda: backend.all_reduce(torch.zeros(argument), tag=tag),
        "all_gather": lambda: backend.all_gather(torch.zeros(2 * argument), torch.zeros(argument), tag=tag),
        "reduce_scatter": lambda: backend.reduce_scatter(torch.zeros(argument), torch.zeros(2 * argument), tag=tag),
        "broadcast": lambda: backend.broadcast(torch.zeros(10), argument, tag=tag),
        "all_to_all": lambda: backend.all_to_all(torch.zeros(8), torch.zeros(8), *argument, tag=tag),
    }
    with pytest.raises(CommError) as caught:
        calls[kind]().wait()
    with pytest.raises(CommError) as again:
        backend.barrier(), backend.all_reduce(torch.zeros(1)).wait()
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def abandon_job(transport):
    """All ranks leave what is in flight; then the group still works where the transport allows it."""
    backend = backend_by(transport)
    works = [backend.all_reduce(torch.ones(1000)) for _ in range(3)]
    backend.abandon(works, failed=False)
    shard = torch.empty(10)
    backend.reduce_scatter(shard, torch.ones(10 * backend.world_size)).wait()
    return shard.unique().tolist()


def failing_rank_job(transport):
    """Rank 1 fails with a collective in flight; rank 0 waits for it, and is told why."""
    group = dist.new_group(range(dist.get_world_size()))
    backend = backend_by(transport, group)
    shard, full = torch.empty(10), torch.ones(10 * backend.world_size)
    if backend.rank == 1:
        work = backend.reduce_scatter(shard, full)
        try:
            raise ValueError("no such token")
        except ValueError:
            backend.abandon([work], failed=True)
        return "left"
    try:
        for _ in range(3):
            work = backend.reduce_scatter(shard, full)
            work.wait()
            work = backend.all_gather(full, shard)
            work.wait()
    except CommError as error:
        backend.abandon([work], failed=True)  # as an engine does, so that this rank's peers go on to their errors
        return str(error)


def late_job():
    """Rank 1 never issues the collective for which rank 0 waits."""
    group, other = dist.new_group(timeout=timedelta(seconds=1)), dist.new_group()
    backend = backend_by("plain", group)
    told = None
    if backend.rank == 0:
        with pytest.raises(CommError) as caught:
            backend.all_gather(torch.empty(20), torch.empty(10), tag="layers.3").wait()
        told = str(caught.value)
    dist.barrier(other)
    return told


def silent_mismatch_job(transport):
    """Rank 1 gathers other weights than the others, of the same size; then all agree on a norm."""
    backend = backend_by(transport)
    full, shard, norm = torch.empty(10 * backend.world_size), torch.ones(10), torch.ones(3, dtype=torch.float64)
    backend.all_reduce(norm).wait()
    before = norm.tolist()
    backend.all_gather(full, shard, tag="layers.2").wait()
    backend.all_gather(full, shard, tag="layers.4" if backend.rank == 1 else "layers.3").wait()
    with pytest.raises(CommError) as caught:
        backend.all_reduce(norm).wait()
    return before, str(caught.value)


def mismatch_without_end_job(transport):
    """Rank 0 gathers where rank 1 reduces: over gloo both wait until the group's timeout."""
    backend = backend_by(transport, dist.new_group(timeout=timedelta(seconds=1)))
    full, shard = torch.ones(20), torch.ones(10)
    backend.all_gather(full, shard, tag="layers.2").wait()
    gather, reduce = lambda: backend.all_gather(full, shard, tag="layers.3"), lambda: backend.all_reduce(full, tag=7)
    with pytest.raises(CommError) as caught:
        (gather if backend.rank == 0 else reduce)().wait()
    return str(caught.value)


def one_rank_job():
    backend = backend_by("direct")
    full, shard = torch.arange(7.0), torch.empty(7)
    backend.reduce_scatter(shard, full).wait()
    assert torch.equal(shard, full)
    backend.all_gather(full.zero_(), shard).wait()
    assert torch.equal(full, torch.arange(7.0))
    backend.all_reduce(full).wait()
    backend.broadcast(full, 0).wait()
    assert torch.equal(full, torch.arange(7.0))
    backend.all_to_all(full.zero_(), shard).wait()
    return torch.equal(full, shard)


def refused_job():
    backend, messages = backend_by("direct"), []
    for call in (
        lambda: backend.all_reduce(torch.zeros(2, 2)),
        lambda: backend.reduce_scatter(torch.zeros(8)[::2], torch.zeros(8)),
        lambda: backend.reduce_scatter(torch.zeros(3), torch.zeros(7)),
        lambda: backend.all_gather(torch.zeros(8), torch.zeros(4, dtype=torch.float64)),
        lambda: backend.broadcast(torch.zeros(8), 2),
        lambda: backend.all_to_all(torch.zeros(8), torch.zeros(7)),
        lambda: backend.all_to_all(torch.zeros(8), torch.zeros(8), [4, 4], [2, 6]),
    ):
        with pytest.raises(CommError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def recorded_job():
    dist.configure(enabled=True)
    backend = dist.group_backend()
    full, shard = torch.ones(20 * backend.world_size), torch.empty(20)
    backend.reduce_scatter(shard, full).wait()
    works = [backend.all_gather(full, shard), backend.all_reduce(full)]
    assert all(isinstance(work.poll(), bool) for work in works)
    backend.abandon(works, failed=False)
    backend.barrier()
    return {op: {size: row[0] for size, row in rows.items()} for op, rows in dist.comms_logger.comms_dict.items()}


@pytest.mark.parametrize("world_size", swept([2, 3, 4], lambda world_size: world_size < 4))
def test_primitives_equal_plain_torch(world_size, transport):
    assert run_ranks(world_size, primitives_job, transport) == [[]] * world_size


def test_empty_tensors_cost_nothing(transport):
    assert run_ranks(2, empty_job, transport) == [True, True]


@pytest.mark.parametrize("world_size", [2, 3])
def test_poll_makes_progress_and_waits_for_nobody(world_size, transport):
    assert run_ranks(world_size, poll_job, transport) == [[world_size]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_issuing_waits_for_nobody(world_size, transport):
    assert run_ranks(world_size, many_in_flight_job, transport) == [True] * world_size


def test_each_group_has_its_backend(transport):
    assert run_ranks(3, groups_job, transport) == [[2], [2], [2, 2]]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (("all_gather", 10, "layers.3"), ("all_gather", 10, "layers.4"), "an all-gather of 20 float32 ({})"),
        (("all_gather", 10, "a"), ("reduce_scatter", 10, "a"), None),
        (("all_reduce", 10, "a"), ("all_reduce", 11, "a"), None),
        (("broadcast", 0, "a"), ("broadcast", 1, "a"), None),
    ],
)
@pytest.mark.usefixtures("direct")
def test_ranks_that_do_different_things_are_told_both(first, second, says):
    mine, theirs = run_ranks(2, mismatch_job, first, second)
    assert mine.startswith("rank 0 makes a")
    assert "where rank 1 makes a" in mine
    if says:
        assert f"rank 0 makes {says.format('layers.3')} where rank 1 makes {says.format('layers.4')};" in mine
        assert f"rank 1 makes {says.format('layers.4')} where rank 0 makes {says.format('layers.3')};" in theirs


@pytest.mark.usefixtures("direct")
def test_parts_of_an_all_to_all_that_do_not_agree_are_named():
    first, second = ("all_to_all", ([4, 4], [4, 4]), None), ("all_to_all", ([3, 5], [3, 5]), None)
    told = run_ranks(2, mismatch_job, first, second)
    by_finder = [  # of the two, the one that finds its part first; the other may find only that its peer has failed
        ("rank 0 expects 4 elements from rank 1 in an all-to-all", "sends it 3"),
        ("rank 1 expects 3 elements from rank 0 in an all-to-all", "sends it 4"),
    ]
    assert any(expects in each and sends in each for each in told for expects, sends in by_finder), told


@pytest.mark.parametrize("transport", ["messages", "plain"])
def test_ranks_that_gather_different_weights_of_one_size_are_told_both(transport):
    for rank, (norm, message) in enumerate(run_ranks(3, silent_mismatch_job, transport)):
        assert norm == [3.0] * 3
        own, other, others_rank = ("4", "3", 0) if rank == 1 else ("3", "4", 1)
        assert message.startswith(
            f"rank {rank} makes an all-gather of 30 float32 (layers.{own}) where rank {others_rank} makes an "
            f"all-gather of 30 float32 (layers.{other}); all ranks of a group"
        )


@pytest.mark.parametrize("transport", ["messages", "plain"])
def test_ranks_that_wait_for_each_other_in_different_collectives_are_told_both(transport):
    first, second = run_ranks(2, mismatch_without_end_job, transport)
    gather, reduce = "an all-gather of 20 float32 (layers.3)", "an all-reduce of 20 float32 (7)"
    assert first.startswith(f"rank 0 cannot finish {gather}: ")
    assert second.startswith(f"rank 1 cannot finish {reduce}: ")
    assert f"rank 0 makes {gather} where rank 1 makes {reduce}; " in first + second or (
        f"rank 1 makes {reduce} where rank 0 makes {gather}; " in first + second
    )


def test_the_group_works_after_all_ranks_abandoned(transport):
    assert run_ranks(3, abandon_job, transport) == [[3.0]] * 3


def late_looker_job(transport):
    """Rank 1 fails, and rank 0 follows it, before rank 2 looks."""
    group = dist.new_group(range(dist.get_world_size()))
    backend = backend_by(transport, group)
    shard, full = torch.empty(10), torch.ones(10 * backend.world_size)
    if backend.rank == 2:
        dist.recv(torch.empty(1), 0)
    try:
        if backend.rank == 1:
            raise ValueError("no such token")
        backend.reduce_scatter(shard, full).wait()
    except (ValueError, CommError) as error:
        backend.abandon([], failed=True)
        if backend.rank == 0:
            dist.send(torch.empty(1), 2)
        return str(error)


def test_the_first_failure_is_named_where_others_followed_it(transport):
    for each in run_ranks(3, late_looker_job, transport):
        assert "no such token" in each


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_fails_is_named_to_those_that_wait(world_size, transport):
    told = run_ranks(world_size, failing_rank_job, transport)
    assert told[1] == "left"
    for each in told[:1] + told[2:]:
        assert "no such token" in each or "rank 1 left" in each


def test_a_collective_that_times_out_is_named():
    told, _ = run_ranks(2, late_job)
    assert told.startswith("rank 0 cannot finish an all-gather of 20 float32 (layers.3): ")


def test_one_rank_copies():
    assert run_ranks(1, one_rank_job) == [True]


def test_bad_arguments_are_named():
    shape, strides, shard, dtype, source, uneven, parts = run_ranks(2, refused_job)[0]
    assert "(2, 2)" in shape
    assert "strides (2,)" in strides
    assert "a shard of 3 elements does not fit a full buffer of 7" in shard
    assert "torch.float64" in dtype
    assert "broadcast(source=2) in a group of 2 ranks" in source
    assert "input_numels None do not cut a buffer of 7" in uneven
    assert "sends itself 2 elements and expects 4" in parts


def test_the_comms_logger_sees_them():
    counts = {"reduce_scatter": {160: 1}, "barrier": {0: 1}}
    assert run_ranks(2, recorded_job) == [counts, counts]
