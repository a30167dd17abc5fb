"""Training over `ccl`: torch's own DDP, FSDP2 and DTensor, and DeepSpeed's engine, give what they give over gloo."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as torch_dist
from deepspeed.testing.distributed import run_ranks
from ds_ext_cpu.testing import TRANSPORTS, ccl_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def model():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 64), torch.nn.LayerNorm(64)]
    return torch.nn.Sequential(*layers)


def losses(trained, rank, steps=4):
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        batch = torch.randn(6, 64, generator=generator)
        loss = (trained(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def ddp_job(transport):
    rank = torch_dist.get_rank()
    over_gloo = losses(DistributedDataParallel(model(), bucket_cap_mb=0.05), rank)
    with ccl_group(transport) as group:
        over_ccl = losses(DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.05), rank)
        torch_dist.barrier(group)
    return over_gloo, over_ccl


def fsdp_job(transport):
    rank, found = torch_dist.get_rank(), []
    with ccl_group(transport) as group:
        for members in (torch_dist.group.WORLD, group):
            mesh, sharded = DeviceMesh.from_group(members, "cpu"), model()
            for layer in sharded:
                fully_shard(layer, mesh=mesh)
            found.append(losses(fully_shard(sharded, mesh=mesh), rank))
        torch_dist.barrier(group)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("job", [ddp_job, fsdp_job])
def test_torch_trains_as_over_gloo(job, transport):
    if transport == "read" and run_ranks(2, shm_job) == [True, True]:
        pytest.skip("the kernel does not let ranks read each other's memory")
    for over_gloo, over_ccl in run_ranks(2, job, transport):
        assert over_gloo == over_ccl
        assert over_gloo[-1] < over_gloo[0]


def shm_job():
    from ds_ext_cpu.comm import ccl

    with ccl_group() as group:
        return ccl.transport(group) == "shm"


def dtensor_job():
    whole = torch.arange(48.0).view(8, 6)
    with ccl_group() as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])  # an all-to-all
        assert torch.equal(columns.full_tensor(), whole)
        product = columns @ rows.redistribute(mesh, [Replicate()]).t().redistribute(mesh, [Shard(0)])  # a partial sum
        assert torch.equal(product.full_tensor(), whole @ whole.t())
        torch_dist.barrier(group)


def test_dtensors_are_redistributed():
    run_ranks(2, dtensor_job)


SCRIPT = """
import json, os, sys
import deepspeed, torch, torch.distributed as torch_dist
from deepspeed.errors import CommError
from deepspeed.pipe import PipelineModule

torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="ccl", verbose=False)
rank = torch_dist.get_rank()


def net():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 64))


def batch(step, of):
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + of))


def config(**more):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0, "torch_adam": True}}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "optimizer": optimizer, **more}


def step_of(engine, step):
    x = batch(step, rank)
    loss = (engine(x) - x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def plain():
    model, found = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(4):
        both = [(model(x) - x).square().mean() for x in (batch(step, 0), batch(step, 1))]
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([each.item() for each in both])
    return found


found = {"backend": torch_dist.get_backend(), "plain": [each[rank] for each in plain()], "both": plain()}
for stage in (0, 2, 3):
    engine, *_ = deepspeed.initialize(model=net(), config=config(zero_optimization={"stage": stage}))
    found[f"stage {stage}"] = [step_of(engine, step) for step in range(4)]

module = PipelineModule(list(net()), num_stages=2, loss_fn=lambda out, x: (out - x).square().mean())
engine, *_ = deepspeed.initialize(model=module, config=config(gradient_accumulation_steps=2))
data = iter([(batch(step, of),) * 2 for step in range(4) for of in (0, 1)])
found["pipeline"] = [engine.train_batch(data).item() for _ in range(4)]

# a rank fails in two batches before the other one comes to the first of them; both go on afterwards
engine, *_ = deepspeed.initialize(model=net(), config=config(zero_optimization={"stage": 2}))
step_of(engine, 0)
store = torch_dist.distributed_c10d._get_default_store()
if rank == 0:
    store.wait(["failed"])
found["failures"] = []
for _ in range(2):
    try:
        x = batch(1, rank)
        loss = (engine(x) - x).square().mean()
        if rank == 1:
            loss.register_hook(lambda gradient: 1 / 0)
        engine.backward(loss)
        engine.step()
    except ZeroDivisionError:
        found["failures"].append("own")
    except CommError as error:
        found["failures"].append(str(error))
store.set("failed", "")
found["after"] = [step_of(engine, step) for step in (1, 2, 3)]
print("FOUND", json.dumps(found), flush=True)
torch_dist.destroy_process_group()
"""


def test_the_engine_trains_as_plain_torch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    children = [
        subprocess.Popen(
            [sys.executable, script],
            env={
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=240)[0] for child in children]
    for output in outputs:
        found = found_by(output)
        assert found["backend"] == "ccl"
        for stage in (0, 2, 3):
            assert found[f"stage {stage}"] == pytest.approx(found["plain"], rel=1e-5), stage
        assert found["pipeline"] == pytest.approx([sum(each) / 2 for each in found["both"]], rel=1e-5)
        assert found["after"] == pytest.approx(found["plain"][1:], rel=1e-5)
    heard = found_by(outputs[0])["failures"]
    assert ["rank 1 failed with ZeroDivisionError: division by zero" in each for each in heard] == [True, True], heard
    assert found_by(outputs[1])["failures"] == ["own", "own"]


def found_by(output):
    assert "FOUND" in output, output
    return json.loads(output.partition("FOUND ")[2].splitlines()[0])
