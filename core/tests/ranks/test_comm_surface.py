"""Every public collective of `deepspeed.comm` gives what torch.distributed promises."""

import os
import threading

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import backend
from deepspeed.comm.record import plain
from deepspeed.comm.torch_group import TorchGroup, forget, group_backend
from deepspeed.errors import CommError
from deepspeed.plugins import FEATURES, hookimpl, plugin_manager
from deepspeed.testing.distributed import run_ranks


def reductions_job():
    rank, W = dist.get_rank(), dist.get_world_size()
    total = W * (W - 1) / 2
    x = torch.full((4,), float(rank))
    assert dist.all_reduce(x) is None
    assert (x == total).all()
    x = torch.full((4,), float(rank))
    handle = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    handle.wait()
    assert (x == W - 1).all()
    x = torch.full((4,), float(rank))
    dist.inference_all_reduce(x)
    assert (x == total).all()
    xs = [torch.full((n,), float(rank)) for n in (1, 5)]
    dist.all_reduce_coalesced(xs, async_op=True).wait()
    assert all((x == total).all() for x in xs)
    x = torch.full((4,), float(rank))
    dist.reduce(x, dst=W - 1)
    assert rank != W - 1 or (x == total).all()
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r + rank)) for r in range(W)])
    assert (out == W * rank + total).all()
    whole = torch.arange(2.0 * W)
    for reduce_scatter in (dist.reduce_scatter_tensor, dist.reduce_scatter_fn):
        reduce_scatter(out, whole)
        assert torch.equal(out, W * whole[2 * rank : 2 * rank + 2])
    return True


def copies_job():
    rank, W = dist.get_rank(), dist.get_world_size()
    own = torch.full((2,), float(rank))
    everyone = torch.arange(float(W)).repeat_interleave(2)
    x = own.clone()
    dist.broadcast(x, src=W - 1)
    assert (x == W - 1).all()
    gathered = [torch.empty(2) for _ in range(W)]
    dist.all_gather(gathered, own)
    assert torch.equal(torch.cat(gathered), everyone)
    for all_gather in (dist.all_gather_into_tensor, dist.allgather_fn):
        out = torch.empty(2 * W)
        all_gather(out, own)
        assert torch.equal(out, everyone)
    outs = [torch.empty(2 * W), torch.empty(W)]
    dist.all_gather_coalesced(outs, [own, own[:1].clone()], async_op=True).wait()
    assert torch.equal(outs[0], everyone)
    assert torch.equal(outs[1], torch.arange(float(W)))
    gathered = [torch.empty(2) for _ in range(W)] if rank == 1 else None
    dist.gather(own, gathered, dst=1)
    assert gathered is None or torch.equal(torch.cat(gathered), everyone)
    x = torch.empty(2)
    dist.scatter(x, [torch.full((2,), 10.0 * r) for r in range(W)] if rank == 0 else None, src=0)
    assert (x == 10 * rank).all()
    x = torch.empty(W)
    dist.all_to_all_single(x, torch.arange(float(W)) + 10 * rank)
    assert torch.equal(x, 10 * torch.arange(float(W)) + rank)
    outs = [torch.empty(1) for _ in range(W)]
    dist.all_to_all(outs, [torch.full((1,), 10.0 * rank + r) for r in range(W)])
    assert [o.item() for o in outs] == [10.0 * r + rank for r in range(W)]
    return True


def objects_and_messages_job():
    rank, W = dist.get_rank(), dist.get_world_size()
    objects = [None] * W
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(W)]
    box = ["from 0" if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box == ["from 0"]
    right, left = (rank + 1) % W, (rank - 1) % W
    x = torch.empty(3)
    works = [dist.irecv(x, src=left, tag=5), dist.isend(torch.full((3,), float(rank)), dst=right, tag=5)]
    for work in works:
        work.wait()
    assert (x == left).all()
    if rank == 0:
        dist.send(torch.ones(1), dst=1)
    elif rank == 1:
        assert dist.recv(x[:1], src=0) == 0
        assert x[0] == 1
    dist.monitored_barrier()
    dist.barrier()
    return True


def groups_job():
    rank = dist.get_rank()
    group = dist.new_group([2, 0])
    assert dist.get_all_ranks_from_group() == [0, 1, 2, 3]
    if rank not in (0, 2):
        return dist.get_rank(group)
    members = dist.get_all_ranks_from_group(group)
    assert sorted(members) == [0, 2]
    assert dist.get_global_rank(group, dist.get_rank(group)) == rank
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x.item() == 2
    return dist.get_world_size(group)


def recorded_job():
    dist.configure(enabled=True)
    dist.all_reduce(torch.ones(256))
    dist.all_gather_into_tensor(torch.empty(2 * 16), torch.ones(16))
    return {op: list(rows) for op, rows in dist.comms_logger.comms_dict.items()}


def adopted_job():
    """torch.distributed was initialized by the pool, not by us: `init_distributed` takes it as it is."""
    dist.init_distributed("nosuch-library")
    dist.init_distributed(dist_init_required=False)
    return dist.get_world_size(), dist.get_local_rank(), dist.is_backend("gloo")


class PluginBackend(TorchGroup):
    def __init__(self, group):
        super().__init__(group)
        self.name = "mine"


class MinePlugin:
    @hookimpl
    def ds_comm_backend(self, name, group):
        return PluginBackend(group) if name == "mine" and group is not None else None


def other_backend_job():
    plugin_manager().register(MinePlugin(), "mine", FEATURES)
    plugin_manager().activate("mine", FEATURES)
    try:
        dist.init_deepspeed_backend("mine")
        assert dist.is_backend("mine")
        assert dist.group_backend(dist.new_group([dist.get_rank()])).name == "mine"
        dist.init_deepspeed_backend("torch")
        assert dist.is_backend("gloo")
    finally:
        plugin_manager().unregister("mine", FEATURES)
    try:
        dist.init_deepspeed_backend("nosuch")
    except CommError as error:
        return str(error)
    return None


def mesh_job():
    mesh = dist.initialize_mesh_device((2, 2), ("data_parallel", "sequence_parallel"))
    world = dist.get_world_group()
    line = dist.initialize_mesh_device((4,), ("all",))
    with pytest.raises(CommError, match=r"the shape \(3, 2\), .* and 4 ranks"):
        dist.initialize_mesh_device((3, 2), ("a", "b"))
    groups = [mesh.get_group(name) for name in ("data_parallel", "sequence_parallel")]
    assert [backend.timeout_of(group) for group in groups] == [backend.timeout_of(world)] * 2
    assert line.get_group("all").size() == 4
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=groups[0])
    assert value.item() == {0: 2, 1: 4, 2: 2, 3: 4}[dist.get_rank()]
    return mesh.get_local_rank("data_parallel"), mesh.get_local_rank("sequence_parallel")


def test_reductions():
    assert all(run_ranks(2, reductions_job))
    assert all(run_ranks(4, reductions_job))


def test_copies():
    assert all(run_ranks(2, copies_job))
    assert all(run_ranks(4, copies_job))


def test_objects_messages_and_barriers():
    assert all(run_ranks(2, objects_and_messages_job))


def test_groups():
    assert run_ranks(4, groups_job) == [2, -1, 2, -1]


def test_recording_sees_whole_messages():
    assert run_ranks(2, recorded_job)[0] == {"all_reduce": [1024], "all_gather_into_tensor": [128]}


def test_a_process_group_that_exists_is_adopted():
    assert run_ranks(2, adopted_job) == [(2, 0, True), (2, 1, True)]


def test_backend_by_name_and_by_hand():
    assert "no installed plugin offers" in run_ranks(2, other_backend_job)[0]


def test_device_mesh():
    assert run_ranks(4, mesh_job) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def barrier_of_a_thread_job():
    os.environ["DS_COMM_DIRECT"] = "0"  # put back after the job
    forget()
    backend = plain(group_backend())
    backend.all_reduce(torch.ones(1)).wait()
    before = backend.watch.issued.number
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()
    return backend.watch.issued.number - before


def test_a_barrier_of_a_thread_is_not_among_the_collectives_of_the_engine():
    assert run_ranks(2, barrier_of_a_thread_job) == [0, 0]
