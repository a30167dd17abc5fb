"""The three collectives in place, over gloo, against sums computed by hand: the core's, and both of ds-ext-cpu."""

import os

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import Piece
from deepspeed.comm.pieces import even_pieces
from deepspeed.comm.torch_backend import TorchBackend
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks

NUMEL = 400_003  # more than 1 MiB of fp32, and no multiple of anything


def values_of(rank, numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def sum_in_rank_order(world_size, numel, dtype, seed=0):
    """What the ranks must get, to the bit: fp32 left to right, rounded once for low precision."""
    total = values_of(0, numel, dtype, seed).float()
    for rank in range(1, world_size):
        total += values_of(rank, numel, dtype, seed)
    return total.to(dtype)


def backend_by(transport, **options):
    """A new backend over this transport; the ranks' environment is put back after the job."""
    os.environ["DS_COMM_DIRECT"] = "1" if transport == "direct" else "0"
    kind = TorchBackend if transport == "plain" else type(dist.backend())
    backend = kind("gloo", **options)
    backend.connect()
    (world,) = backend.groups.values()
    assert getattr(world, "is_direct", None) == {"direct": True, "messages": False}.get(transport)
    return backend


def agrees(found, expected, transport, world_size):
    """To the bit; but gloo itself adds in another order, and rounds each sum."""
    if transport != "plain" or world_size == 2:
        return torch.equal(found, expected)
    tolerance = world_size * torch.finfo(found.dtype).eps
    return torch.allclose(found, expected, rtol=tolerance, atol=4 * tolerance)


def uneven_pieces(numel, world_size):
    """Not in rank order, with a gap, an empty piece and several pieces for one owner."""
    last = world_size - 1
    return [
        Piece(5, 1000, last),
        Piece(1000, 1000, 0),
        Piece(1000, numel // 2, 0),
        Piece(numel // 2 + 3, numel - 1, last),
        Piece(numel - 1, numel, 0),
    ]


def reduce_job(transport, dtype, numel):
    flat = values_of(dist.get_rank(), numel, dtype)
    work = backend_by(transport).reduce(flat)
    work.wait()
    work.wait()
    world_size = dist.get_world_size()
    return agrees(flat, sum_in_rank_order(world_size, numel, dtype), transport, world_size)


def to_owners_job(transport, dtype, cut):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    pieces = even_pieces(NUMEL, world_size) if cut == "even" else uneven_pieces(NUMEL, world_size)
    before = values_of(rank, NUMEL, dtype)
    flat = before.clone()
    work = backend_by(transport).reduce_to_owners(flat, pieces)
    work.wait()
    work.wait()
    expected = sum_in_rank_order(world_size, NUMEL, dtype)
    covered = torch.zeros(NUMEL, dtype=torch.bool)
    for start, stop, owner in pieces:
        covered[start:stop] = True
        if owner == rank and not torch.equal(flat[start:stop], expected[start:stop]):
            return f"piece {start}:{stop} differs"
    return torch.equal(flat[~covered], before[~covered])


def gather_job(transport, dtype, cut):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    pieces = even_pieces(NUMEL, world_size) if cut == "even" else uneven_pieces(NUMEL, world_size)
    flat = values_of(rank, NUMEL, dtype)
    expected = flat.clone()
    for start, stop, owner in pieces:
        expected[start:stop] = values_of(owner, NUMEL, dtype)[start:stop]
    backend_by(transport).gather_from_owners(flat, pieces).wait()
    return torch.equal(flat, expected)


def many_in_flight_job(transport, limit_bytes):
    """Forty exchanges of changing kind and size, waited for in another order on each rank."""
    backend = backend_by(transport, staging_bytes=limit_bytes)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sizes = [300_000 + 1000 * i for i in range(40)]
    flats = [values_of(rank, numel, torch.float32, seed) for seed, numel in enumerate(sizes)]
    works = []
    most_held = 0
    for i, flat in enumerate(flats):
        pieces = even_pieces(flat.numel(), world_size)
        works.append(backend.reduce(flat) if i % 2 else backend.reduce_to_owners(flat, pieces))
        most_held = max(most_held, backend.held_bytes)
    order = list(range(40))
    for i in order[rank:] + order[:rank] if rank else reversed(order):
        works[i].wait()
    for i, flat in enumerate(flats):
        expected = sum_in_rank_order(world_size, flat.numel(), torch.float32, i)
        piece = even_pieces(flat.numel(), world_size)[rank]
        cut = slice(None) if i % 2 else slice(piece.start, piece.stop)
        assert agrees(flat[cut], expected[cut], transport, world_size), i
    backend.release()
    assert backend.held_bytes == 0
    return most_held


def subgroup_job(transport):
    """Ranks 3 and 1: ranks within the group differ from global ones."""
    group = dist.new_group([1, 3])
    backend = backend_by(transport)
    rank = dist.get_rank()
    if rank not in (1, 3):
        return True
    pieces = [Piece(0, 10, 1), Piece(10, NUMEL, 0)]
    flat = torch.full((NUMEL,), float(rank))
    backend.reduce_to_owners(flat, pieces, group).wait()
    own = slice(0, 10) if rank == 3 else slice(10, NUMEL)
    assert (flat[own] == 4.0).all()
    flat.fill_(rank)
    backend.gather_from_owners(flat, pieces, group).wait()
    assert (flat[:10] == 3).all()
    assert (flat[10:] == 1).all()
    flat.fill_(rank)
    backend.reduce(flat, group).wait()
    return bool((flat == 4).all())


def one_rank_job():
    backend = dist.backend()
    flat = torch.arange(7.0)
    backend.reduce(flat).wait()
    backend.reduce_to_owners(flat, [Piece(0, 7, 0)]).wait()
    backend.gather_from_owners(flat, [Piece(0, 7, 0)]).wait()
    return torch.equal(flat, torch.arange(7.0))


def refused_job():
    messages = []
    for flat, pieces in [
        (torch.zeros(4, 4), []),
        (torch.zeros(8)[::2], []),
        (torch.zeros(8), [Piece(0, 9, 0)]),
        (torch.zeros(8), [Piece(0, 8, 2)]),
    ]:
        with pytest.raises(CommError) as caught:
            dist.backend().reduce_to_owners(flat, pieces)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_reduce_adds_in_rank_order(world_size, dtype, transport):
    assert run_ranks(world_size, reduce_job, transport, dtype, 1_000_001) == [True] * world_size


@pytest.mark.parametrize("numel", [0, 1, 3])
def test_reduce_small(numel, transport):
    assert run_ranks(2, reduce_job, transport, torch.float32, numel) == [True, True]


@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_reduce_to_owners(world_size, dtype, cut, transport):
    assert run_ranks(world_size, to_owners_job, transport, dtype, cut) == [True] * world_size


@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gather_from_owners(world_size, cut, transport):
    assert run_ranks(world_size, gather_job, transport, torch.bfloat16, cut) == [True] * world_size


@pytest.mark.parametrize("limit_bytes", [1, 4 << 20, 1 << 30])
def test_many_messages_in_flight_stay_apart_and_within_the_limit(limit_bytes):
    largest = (4 << 20) if limit_bytes == 1 else limit_bytes  # one exchange may always be held
    assert all(held <= largest for held in run_ranks(2, many_in_flight_job, "messages", limit_bytes))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_in_flight_stay_apart(world_size, transport):
    run_ranks(world_size, many_in_flight_job, transport, 8 << 20)


def test_subgroup_ranks_are_not_global_ranks(transport):
    assert run_ranks(4, subgroup_job, transport) == [True] * 4


def test_one_rank_is_free():
    assert run_ranks(1, one_rank_job) == [True]


def test_bad_buffers_and_pieces_are_named():
    shape, strided, too_long, no_owner = run_ranks(2, refused_job)[0]
    assert "(4, 4)" in shape
    assert "strides (2,)" in strided
    assert "stop=9" in too_long
    assert "group of 2 ranks" in no_owner
