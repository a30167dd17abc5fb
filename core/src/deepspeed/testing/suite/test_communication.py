"""Collectives between two ranks, over the accelerator's own library: each rank must hold the right values."""

from typing import Any

import pytest
import torch
import torch.distributed

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.testing import requirements
from deepspeed.testing.suite import fixtures

_NUMEL = 1023


def _start() -> tuple[int, torch.device]:
    """Make this rank's device the current one, and return the rank's number and its device."""
    accelerator = get_accelerator()
    accelerator.set_device(dist.get_local_rank())
    return dist.get_rank(), torch.device(accelerator.current_device_name())


def _arange(device: torch.device, start: float, dtype: torch.dtype = torch.float32, numel: int = _NUMEL) -> Any:
    return (torch.arange(numel, device=device) % 97 + start).to(dtype)


def join() -> tuple[str, str, int]:
    rank, _ = _start()
    return torch.distributed.get_backend(), get_accelerator().communication_backend_name(), rank


def test_ranks_join_over_its_library() -> None:
    answers = fixtures.on_ranks(2, join)
    assert [rank for *_, rank in answers] == [0, 1]
    for used, stated, _ in answers:
        assert used == stated


def all_reduce(dtype: torch.dtype) -> torch.Tensor:
    rank, device = _start()
    x = _arange(device, rank, dtype)
    dist.all_reduce(x)
    return x.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_all_reduce_adds(dtype: torch.dtype) -> None:
    requirements.two_ranks.check()
    if dtype.is_floating_point:
        requirements.dtype(dtype).check()
    wanted = (_arange(torch.device("cpu"), 0) * 2 + 1).to(dtype)
    for found in fixtures.on_ranks(2, all_reduce, dtype):
        assert torch.equal(found, wanted)


def all_reduce_later() -> tuple[torch.Tensor, torch.Tensor]:
    rank, device = _start()
    x = _arange(device, rank)
    work: Any = dist.all_reduce(x, async_op=True)
    y = _arange(device, rank) * 3  # other work meanwhile
    work.wait()
    return (x + y).cpu(), x.cpu()


def test_a_collective_in_flight_is_done_after_its_wait() -> None:
    for rank, (total, summed) in enumerate(fixtures.on_ranks(2, all_reduce_later)):
        base = _arange(torch.device("cpu"), 0)
        assert torch.equal(summed, base * 2 + 1)
        assert torch.equal(total, base * 2 + 1 + (base + rank) * 3)


def gather_and_scatter() -> dict[str, torch.Tensor]:
    rank, device = _start()
    mine = _arange(device, 100 * rank)
    everyone = torch.empty(2 * _NUMEL, device=device)
    dist.all_gather_into_tensor(everyone, mine)
    listed = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(listed, mine)
    part = torch.empty(_NUMEL, device=device)
    dist.reduce_scatter_tensor(part, everyone.clone())
    swapped = torch.empty(2 * _NUMEL, device=device)
    dist.all_to_all_single(swapped, everyone + rank)
    told = _arange(device, 100 * rank)
    dist.broadcast(told, 1)
    dist.barrier()
    found = {"gathered": everyone, "listed": torch.cat(listed), "scattered": part, "swapped": swapped, "told": told}
    return {name: value.cpu() for name, value in found.items()}


def test_gather_scatter_swap_and_broadcast() -> None:
    first, second = (_arange(torch.device("cpu"), 100 * rank) for rank in range(2))
    for rank, found in enumerate(fixtures.on_ranks(2, gather_and_scatter)):
        mine = (first, second)[rank]
        assert torch.equal(found["gathered"], torch.cat((first, second)))
        assert torch.equal(found["listed"], torch.cat((first, second)))
        assert torch.equal(found["scattered"], 2 * mine)
        assert torch.equal(found["swapped"], torch.cat((mine, mine + 1)))
        assert torch.equal(found["told"], second)


def send_and_receive() -> torch.Tensor:
    rank, device = _start()
    x = _arange(device, 7 * rank)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        received = torch.empty_like(x)
        dist.recv(received, 0)
        dist.send(received * 2, 0)
    return x.cpu()


def test_one_rank_sends_to_another() -> None:
    first, second = fixtures.on_ranks(2, send_and_receive)
    assert torch.equal(first, _arange(torch.device("cpu"), 0) * 2)
    assert torch.equal(second, _arange(torch.device("cpu"), 7))


def zeros_collectives() -> dict[str, torch.Tensor]:
    rank, device = _start()
    backend = dist.group_backend()
    backend.connect()
    full, shard = (backend.allocate(numel, torch.float32, device) for numel in (2 * _NUMEL, _NUMEL))
    found = {}
    backend.all_reduce(full.copy_(_arange(device, rank, numel=2 * _NUMEL)), tag="sum").wait()
    found["summed"] = full.cpu().clone()
    backend.reduce_scatter(shard, full.copy_(_arange(device, rank, numel=2 * _NUMEL)), tag=1).wait()
    found["scattered"] = shard.cpu().clone()
    backend.reduce_scatter(own := full.chunk(2)[rank], full.copy_(_arange(device, rank, numel=2 * _NUMEL))).wait()
    found["scattered in place"] = own.cpu().clone()
    backend.all_gather(full.zero_(), shard.copy_(_arange(device, 100 * rank))).wait()
    found["gathered"] = full.cpu().clone()
    (own := full.zero_().chunk(2)[rank]).copy_(_arange(device, 100 * rank))
    backend.all_gather(full, own).wait()
    found["gathered in place"] = full.cpu().clone()
    backend.broadcast(shard.copy_(_arange(device, 100 * rank)), 1).wait()
    found["broadcast"] = shard.cpu().clone()
    swapped = backend.allocate(2 * _NUMEL, torch.float32, device)
    backend.all_to_all(swapped, full + rank).wait()
    found["swapped"] = swapped.cpu().clone()
    sent, received = [1 + rank, 3 + rank], [1 + 2 * rank, 2 + 2 * rank]  # elements to and from ranks 0 and 1
    uneven = backend.allocate(sum(received), torch.float32, device)
    backend.all_to_all(uneven, _arange(device, 100 * rank, numel=sum(sent)), received, sent).wait()
    found["swapped unevenly"] = uneven.cpu().clone()
    backend.barrier()
    backend.release()
    return found


def test_zeros_collectives() -> None:
    host = torch.device("cpu")
    both = _arange(host, 0, numel=2 * _NUMEL) * 2 + 1
    first, second = (_arange(host, 100 * rank) for rank in range(2))
    for rank, found in enumerate(fixtures.on_ranks(2, zeros_collectives)):
        own = both.chunk(2)[rank]
        mine = (first, second)[rank]
        sent = [_arange(host, 100 * a, numel=4 + 2 * a).split([1 + a, 3 + a])[rank] for a in range(2)]
        wanted = {
            "summed": both,
            "scattered": own,
            "scattered in place": own,
            "gathered": torch.cat((first, second)),
            "gathered in place": torch.cat((first, second)),
            "broadcast": second,
            "swapped": torch.cat((mine, mine + 1)),
            "swapped unevenly": torch.cat(sent),
        }
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), f"{name} on rank {rank}"


def many_in_flight() -> list[float]:
    rank, device = _start()
    backend = dist.group_backend()
    fulls = [backend.allocate(2 * _NUMEL, torch.float32, device).fill_(number + rank) for number in range(20)]
    shards = [backend.allocate(_NUMEL, torch.float32, device) for _ in fulls]
    works = [backend.reduce_scatter(shard, full) for shard, full in zip(shards, fulls, strict=True)]
    for work in (*works[::2], *works[1::2]):
        assert isinstance(work.poll(), bool)
        work.wait()
        work.wait()
    return [value for shard in shards for value in shard.unique().tolist()]


def test_many_are_in_flight_and_waited_for_in_any_order() -> None:
    wanted = [2.0 * number + 1 for number in range(20)]
    assert fixtures.on_ranks(2, many_in_flight) == [wanted, wanted]


def abandoned() -> list[float]:
    rank, device = _start()
    backend = dist.group_backend()
    full, shard = (backend.allocate(numel, torch.float32, device).fill_(rank) for numel in (2 * _NUMEL, _NUMEL))
    backend.abandon([backend.all_gather(full, shard)], failed=False)
    other = backend.allocate(_NUMEL, torch.float32, device).fill_(rank)
    backend.all_reduce(other).wait()
    return other.unique().tolist()


def test_the_group_works_after_all_ranks_abandoned_a_collective() -> None:
    assert fixtures.on_ranks(2, abandoned) == [[1.0], [1.0]]
