"""Collectives between two ranks, over the accelerator's own library: what each rank holds afterwards."""

from typing import Any

import pytest
import torch
import torch.distributed

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.testing import requirements
from deepspeed.testing.suite import ranks

_NUMEL = 1023


def _start() -> tuple[int, torch.device]:
    """On a rank: its number, and its device, made current."""
    accelerator = get_accelerator()
    accelerator.set_device(dist.get_local_rank())
    return dist.get_rank(), torch.device(accelerator.current_device_name())


def _arange(device: torch.device, start: float, dtype: torch.dtype = torch.float32, numel: int = _NUMEL) -> Any:
    return (torch.arange(numel, device=device) % 97 + start).to(dtype)


def join() -> tuple[str, str, int]:
    rank, _ = _start()
    return torch.distributed.get_backend(), get_accelerator().communication_backend_name(), rank


def test_ranks_join_over_its_library() -> None:
    answers = ranks.run(2, join)
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
    for found in ranks.run(2, all_reduce, dtype):
        assert torch.equal(found, wanted)


def all_reduce_later() -> tuple[torch.Tensor, torch.Tensor]:
    rank, device = _start()
    x = _arange(device, rank)
    work: Any = dist.all_reduce(x, async_op=True)
    y = _arange(device, rank) * 3  # something else meanwhile
    work.wait()
    return (x + y).cpu(), x.cpu()


def test_an_exchange_in_flight_is_done_after_its_wait() -> None:
    for rank, (total, summed) in enumerate(ranks.run(2, all_reduce_later)):
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
    for rank, found in enumerate(ranks.run(2, gather_and_scatter)):
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
    first, second = ranks.run(2, send_and_receive)
    assert torch.equal(first, _arange(torch.device("cpu"), 0) * 2)
    assert torch.equal(second, _arange(torch.device("cpu"), 7))


def exchange_with_owners() -> tuple[torch.Tensor, torch.Tensor]:
    rank, device = _start()
    backend = dist.backend()
    pieces = [dist.Piece(0, 300, 0), dist.Piece(300, 1000, 1)]
    flat = backend.allocate(1000, torch.float32, device)
    flat.copy_(_arange(device, rank, numel=1000))
    backend.reduce_to_owners(flat, pieces).wait()
    mine = flat[pieces[rank].start : pieces[rank].stop].cpu()
    backend.gather_from_owners(flat, pieces).wait()
    return mine, flat.cpu()


def test_zeros_exchanges_reach_owners_and_come_back() -> None:
    wanted = _arange(torch.device("cpu"), 0, numel=1000) * 2 + 1
    (first, whole), (second, other) = ranks.run(2, exchange_with_owners)
    assert torch.equal(first, wanted[:300])
    assert torch.equal(second, wanted[300:])
    assert torch.equal(whole, wanted)
    assert torch.equal(other, wanted)
