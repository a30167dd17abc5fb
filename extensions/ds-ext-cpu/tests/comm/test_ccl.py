"""The collectives of `ccl` give what gloo gives, over both transports, and sums in the order of ranks."""

import itertools
import os

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.comm.transports import all_gather_into_tensor, reduce_scatter_tensor
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from ds_ext_cpu.comm import ccl
from ds_ext_cpu.testing import TRANSPORTS, ccl_group

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
# nothing, one element, a small one, several windows of shared memory and a remainder
SIZES = (0, 1, 1000, 300_001)
SUM, AVG, PRODUCT, MIN, MAX = (getattr(torch_dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"))
BITS = [getattr(torch_dist.ReduceOp, name) for name in ("BAND", "BOR", "BXOR")]

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture(autouse=True)
def _may_read(transport):
    if transport == "read" and run_ranks(2, transport_job, "") == ["shm", "shm"]:
        pytest.skip("the kernel does not let ranks read each other's memory")


def transport_job(transport):
    with ccl_group(transport) as group:
        return ccl.transport(group)


def test_a_transport_can_be_asked_for(transport):
    assert run_ranks(2, transport_job, transport) == [transport] * 2


def numbers(numel, dtype, rank):
    """Small whole numbers and, of floating types, fractions; other ones on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 7, (numel,), generator=generator).to(dtype)


def reduced(inputs, op):
    """As the library promises: in the order of ranks, halves in fp32, rounded once."""
    dtype, total = inputs[0].dtype, None
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    for each in inputs:
        each = each.to(wide)
        if total is None:
            total = each.clone()
        elif dtype == torch.bool:
            total = {SUM: total | each, PRODUCT: total & each, MIN: total & each, MAX: total | each}[op]
        else:
            way = {SUM: torch.add, AVG: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum}[op]
            total = way(total, each)
    if op == AVG:
        total = total / len(inputs) if wide.is_floating_point else total // len(inputs)
    return total.to(dtype)


def collectives_job(transport, dtype):
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    with ccl_group(transport) as group:
        for numel in SIZES:
            inputs = [numbers(numel, dtype, each) for each in range(world_size)]
            own = inputs[rank]
            ops = [SUM, MIN, MAX, PRODUCT, *([AVG] if dtype != torch.bool else [])] if numel < 2000 else [SUM]
            for op in ops:
                found = own.clone()
                torch_dist.all_reduce(found, op, group=group)
                assert torch.equal(found, reduced(inputs, op)), (numel, op)
            root = world_size - 1
            found = own.clone()
            torch_dist.reduce(found, root, group=group)
            assert torch.equal(found, reduced(inputs, SUM) if rank == root else own), numel
            found = own.clone()
            torch_dist.broadcast(found, root, group=group)
            assert torch.equal(found, inputs[root]), numel

            parts = [torch.full_like(own, False) for _ in inputs]
            torch_dist.all_gather(parts, own, group=group)
            assert all(map(torch.equal, parts, inputs)), numel
            whole = torch.empty(numel * world_size, dtype=dtype)
            all_gather_into_tensor(whole, own, group=group)
            assert torch.equal(whole, torch.cat(inputs)), numel
            place = whole.clone()  # the shard is its own part
            all_gather_into_tensor(place, place.view(world_size, numel)[rank], group=group)
            assert torch.equal(place, whole), numel

            fulls = [numbers(numel * world_size, dtype, 50 + each) for each in range(world_size)]
            wanted = reduced(fulls, SUM).view(world_size, numel)[rank]
            reduce_scatter_tensor(found, fulls[rank], group=group)
            assert torch.equal(found, wanted), numel
            in_place = fulls[rank].clone()
            reduce_scatter_tensor(in_place.view(world_size, numel)[rank], in_place, group=group)
            assert torch.equal(in_place.view(world_size, numel)[rank], wanted), numel
            torch_dist.reduce_scatter(found, list(fulls[rank].view(world_size, numel)), group=group)
            assert torch.equal(found, wanted), numel

            swapped = torch.empty_like(fulls[rank])
            torch_dist.all_to_all_single(swapped, fulls[rank], group=group)
            assert torch.equal(swapped, torch.cat([full.view(world_size, numel)[rank] for full in fulls])), numel
            torch_dist.all_to_all(parts, list(fulls[rank].view(world_size, numel)), group=group)
            assert torch.equal(torch.cat(parts), swapped), numel

            torch_dist.gather(own, parts if rank == root else None, root, group=group)
            assert rank != root or all(map(torch.equal, parts, inputs)), numel
            rows = list(fulls[root].view(world_size, numel)) if rank == root else None
            torch_dist.scatter(found, rows, root, group=group)
            assert torch.equal(found, fulls[root].view(world_size, numel)[rank]), numel


@pytest.mark.parametrize(
    ("dtype", "world_size"),
    swept(
        itertools.product(DTYPES, (2, 3, 4)),
        lambda dtype, world_size: (
            (dtype, world_size)
            in [(torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 3), (torch.float16, 2), (torch.int64, 4)]
            or (dtype in INTEGERS + (torch.bool,) and world_size == 2)
        ),
    ),
)
def test_every_collective_gives_what_plain_torch_gives(dtype, world_size, transport):
    run_ranks(world_size, collectives_job, transport, dtype)


def gloo_job(transport):
    """Where each sum is exact, both libraries give the same bits."""
    rank = torch_dist.get_rank()
    with ccl_group(transport) as group:
        for dtype, op in itertools.product((torch.float32, torch.int32), (SUM, MIN, MAX, PRODUCT)):
            found = torch.arange(70_000).remainder(13).add(rank).to(dtype)
            wanted = found.clone()
            torch_dist.all_reduce(found, op, group=group)
            torch_dist.all_reduce(wanted, op)
            assert torch.equal(found, wanted), (dtype, op)
        for op in BITS:
            found = torch.arange(3000) * (rank + 3)
            wanted = found.clone()
            torch_dist.all_reduce(found, op, group=group)
            torch_dist.all_reduce(wanted, op)
            assert torch.equal(found, wanted), op


def test_reductions_equal_those_of_gloo(transport):
    run_ranks(2, gloo_job, transport)


def uneven_job(transport):
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    with ccl_group(transport) as group:
        for scale in (1, 40_000):  # the larger ones are read, or pass through several windows
            counts = [[scale * (2 * a + b) % (scale * 3) for b in range(world_size)] for a in range(world_size)]
            inputs = [
                torch.cat([torch.full((n, 2), 10.0 * a + b) for b, n in enumerate(counts[a])])
                for a in range(world_size)
            ]
            taken = [counts[a][rank] for a in range(world_size)]
            output = torch.empty(sum(taken), 2)
            torch_dist.all_to_all_single(output, inputs[rank], taken, counts[rank], group=group)
            wanted = [torch.full((n, 2), 10.0 * a + rank) for a, n in enumerate(taken)]
            assert torch.equal(output, torch.cat(wanted)), scale
            parts = [torch.empty(n, 2) for n in taken]
            torch_dist.all_to_all(parts, list(inputs[rank].split(counts[rank])), group=group)
            assert all(map(torch.equal, parts, wanted)), scale
            parts = [torch.empty(scale * (each + 1)) for each in range(world_size)]
            torch_dist.all_gather(parts, torch.full((scale * (rank + 1),), float(rank)), group=group)
            assert all(bool((part == each).all()) for each, part in enumerate(parts)), scale
            shard = torch.empty(scale * (rank + 1))
            torch_dist.reduce_scatter(
                shard, [torch.ones(scale * (each + 1)) for each in range(world_size)], group=group
            )
            assert bool((shard == world_size).all()), scale


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_may_have_different_sizes(transport, world_size):
    run_ranks(world_size, uneven_job, transport)


def strided_job(transport):
    """Tensors that are not contiguous: elements are matched by their index."""
    rank = torch_dist.get_rank()
    with ccl_group(transport) as group:
        found = (torch.arange(12.0).view(3, 4) + rank).t() if rank else (torch.arange(12.0).view(3, 4)).t().contiguous()
        torch_dist.all_reduce(found, group=group)
        assert torch.equal(found, 2 * torch.arange(12.0).view(3, 4).t() + 1)
        target = torch.zeros(2, 3, 5).permute(2, 0, 1)
        all_gather_into_tensor(target.permute(1, 2, 0), torch.full((1, 3, 5), float(rank)), group=group)
        assert [target[:, each].unique().item() for each in range(2)] == [0.0, 1.0]
        param = torch.nn.Parameter(torch.full((4, 3), float(rank)).t())
        torch_dist.broadcast(param.data, 1, group=group)
        assert bool((param == 1).all())
        torch_dist.broadcast(torch.full((7,), 1j * rank), 0, group=group)  # a type that is only moved


def test_tensors_may_be_strided(transport):
    run_ranks(2, strided_job, transport)


def coalesced_job(transport):
    rank = torch_dist.get_rank()
    with ccl_group(transport) as group:
        tensors = [torch.full((numel,), rank + 1.0) for numel in (3, 0, 50_000)]
        torch_dist.all_reduce_coalesced(tensors, group=group)
        assert all(bool((tensor == 3).all()) for tensor in tensors)
        with torch_dist._coalescing_manager(group, torch.device("cpu")):
            for tensor in tensors:
                torch_dist.all_reduce(tensor, group=group)
        assert all(bool((tensor == 6).all()) for tensor in tensors)
        objects = [None, None]
        torch_dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": 0}, {"rank": 1}]


def test_several_tensors_and_objects_at_once(transport):
    run_ranks(2, coalesced_job, transport)


def messages_job(transport):
    """Many messages at once, of all sizes, taken in another order than they were sent."""
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    sizes = [0, 1, 5000, 400_000, 70_000]
    with ccl_group(transport) as group:
        works, found = [], {}
        for peer in range(world_size):
            if peer == rank:
                continue
            for tag, numel in enumerate(sizes):
                for turn in range(2):  # of two with one tag the first comes first
                    message = torch.full((numel,), 100.0 * rank + 10 * peer + tag + turn / 2)
                    works.append(torch_dist.isend(message, group=group, group_dst=peer, tag=tag))
            for tag, numel in reversed(list(enumerate(sizes))):
                for turn in range(2):
                    found[peer, tag, turn] = torch.empty(numel)
                    works.append(torch_dist.irecv(found[peer, tag, turn], group=group, group_src=peer, tag=tag))
        for work in works:
            work.wait()
        for (peer, tag, turn), message in found.items():
            assert bool((message == 100.0 * peer + 10 * rank + tag + turn / 2).all()), (peer, tag, turn)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(transport, world_size):
    run_ranks(world_size, messages_job, transport)


def many_messages_job(transport):
    """More than the slots between two ranks: the others wait for their turn."""
    rank, count = torch_dist.get_rank(), 150
    with ccl_group(transport) as group:
        found = [torch.empty(3) for _ in range(count)]
        sent = [torch_dist.isend(torch.full((3,), float(n)), group=group, group_dst=1 - rank) for n in range(count)]
        for number, message in enumerate(found):
            torch_dist.recv(message, group=group, group_src=1 - rank)
            assert bool((message == number).all())
        for work in sent:
            work.wait()


def test_more_messages_than_slots(transport):
    run_ranks(2, many_messages_job, transport)


def ordered_messages_job(transport):
    """Slots are freed and offered again while rank 1 looks for the first one: it may not take a later one before it."""
    rank, count = torch_dist.get_rank(), 150
    with ccl_group(transport) as group:
        for turn in range(200):
            if rank == 0:
                tensors = [torch.full((3,), float(n)) for n in range(count)]
                for work in [torch_dist.isend(tensor, group=group, group_dst=1) for tensor in tensors]:
                    work.wait()
                continue
            found = [torch.empty(3) for _ in range(count)]
            for message in found:
                torch_dist.recv(message, group=group, group_src=0)
            assert [int(message[0]) for message in found] == list(range(count)), turn


def test_messages_come_in_order_while_slots_are_used_again(transport):
    run_ranks(2, ordered_messages_job, transport)


def own_progress_job(transport):
    """Rank 0 issues and then waits elsewhere, until rank 1 has its result."""
    rank = torch_dist.get_rank()
    with ccl_group(transport) as group:
        tensor = torch.full((200_000,), rank + 1.0)
        work = torch_dist.all_reduce(tensor, group=group, async_op=True)
        message = torch.full((200_000,), float(rank))
        talk = [torch_dist.isend, torch_dist.irecv][rank](message, 1 - rank, group=group)
        if rank == 1:
            work.wait()
            talk.wait()
            assert bool((message == 0).all())
        torch_dist.barrier()  # over gloo: rank 1 comes when it has waited
        while not work.is_completed():  # the thread of this rank may still have to see that rank 1 is through
            os.sched_yield()
        assert work.get_future().value()[0] is not None
        assert bool((tensor == 3).all())


def test_work_goes_on_without_the_caller(transport):
    run_ranks(2, own_progress_job, transport)


def groups_job(transport):
    """Groups of some ranks, at once and issued in other orders; each has an order of its own."""
    rank, world_size = torch_dist.get_rank(), torch_dist.get_world_size()
    pairs = list(itertools.combinations(range(world_size), 2))
    groups = {}
    os.environ["DS_CCL_TRANSPORT"] = transport
    ccl.register()
    for pair in pairs:
        groups[pair] = torch_dist.new_group(pair, backend="ccl")
    own = [pair for pair in pairs if rank in pair]
    works = []
    for turn in range(3):
        for pair in own if rank % 2 else reversed(own):
            tensor = torch.full((100 + turn * 30_000,), rank + 1.0)
            works.append((pair, tensor, torch_dist.all_reduce(tensor, group=groups[pair], async_op=True)))
    for pair, tensor, work in works:
        work.wait()
        assert bool((tensor == sum(pair) + 2).all())
    torch_dist.barrier()
    for pair in own:
        torch_dist.destroy_process_group(groups[pair])


def test_groups_do_not_wait_for_each_other(transport):
    run_ranks(3, groups_job, transport)


def bits_job(transport):
    inputs = torch.randn(100_003, generator=torch.Generator().manual_seed(torch_dist.get_rank()))
    found = []
    with ccl_group(transport) as group:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = inputs.to(dtype)
            torch_dist.all_reduce(tensor, group=group)
            small = inputs[:50].to(dtype)
            torch_dist.all_reduce(small, group=group)
            assert torch.equal(small, tensor[:50])  # by whatever way
            found.append(tensor)
    return found


def test_sums_do_not_depend_on_the_transport(transport):
    for one, other in zip(run_ranks(4, bits_job, transport), run_ranks(4, bits_job, "shm"), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.sweep
def test_sixteen_ranks_on_few_cores(transport):
    run_ranks(16, collectives_job, transport, torch.float32)
    run_ranks(16, messages_job, transport)
