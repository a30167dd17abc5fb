"""Faults on the simulated device: memory that is full, and a device that is lost; what training does then."""

import os
import subprocess

import pytest
import torch
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept

OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
SECTIONS = {"0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "offload": OFFLOAD}
every_section = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)


# ----- the device by itself ------------------------------------------------------------------------------------------


def lost():
    x = torch.ones(2, device="sim:1")
    host = torch.zeros(2).pin_memory()
    torch.sim.synchronize(1)
    torch.sim.lose_device(3, device=1)
    doubled = x * 2
    assert doubled.view(1, 2).shape == (1, 2)  # a view is no operation
    assert doubled.sum().item() == 4  # two more
    assert torch.sim.waiting_jobs(1) == 0
    calls = [
        lambda: x + 1,
        lambda: host.copy_(x, non_blocking=True),
        x.cpu,
        x.tolist,
        x.sum,
        lambda: torch.sim.synchronize(1),
        lambda: torch.sim.current_stream(1).synchronize(),
    ]
    for call in calls:
        with pytest.raises(torch.AcceleratorError, match="^sim:1 is lost"):
            call()
    assert (torch.ones(2, device="sim:0") + 1).sum().item() == 4  # the other one works
    torch.sim.restore_device(device=1)
    torch.sim.synchronize(1)
    assert torch.ones(3, device="sim:1").sum().item() == 3
    with pytest.raises(ValueError, match="after -1 operations"):
        torch.sim.lose_device(-1)


def test_a_device_is_lost_after_so_many_operations(sim):
    sim(lost)


def never_done():
    host = torch.zeros(2).pin_memory()
    host.copy_(torch.ones(2, device="sim"), non_blocking=True)
    torch.sim.lose_device()
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        torch.ones(1, device="sim")
    with pytest.raises(torch.AcceleratorError, match="is lost"):
        torch.sim.synchronize()
    torch.sim.restore_device()
    return host.tolist()


def test_what_was_queued_on_a_lost_device_is_never_done(sim):
    assert sim(never_done) == [[0.0, 0.0]]


def neighbours():
    kept = [torch.full((1,), float(index), device="sim") for index in range(64)]
    del kept[::2]
    torch.sim.empty_cache()  # pages that two blocks share stay
    return torch.cat(kept).tolist()


def test_an_emptied_cache_leaves_what_lies_beside_it(sim):
    assert sim(neighbours) == [[float(index) for index in range(1, 64, 2)]]


def freed_for_another():
    torch.sim.empty_cache()
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    before = torch.sim.memory_reserved()
    torch.sim.set_total_memory(before + (1 << 20))
    del kept  # the allocator keeps it, and gives it back when there is no other way
    both = torch.empty(2 << 20, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 is out of memory: 1048576 bytes were asked for"):
        torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    torch.empty(1 << 20, dtype=torch.uint8, device="sim:1")
    assert both.numel() == 2 << 20
    torch.sim.set_total_memory(4 << 30)
    stats = torch.sim.memory_stats()
    return stats["num_ooms"] > 0 and stats["num_alloc_retries"] > 0


def test_full_memory_is_an_error_when_the_cache_is_empty(sim):
    assert sim(freed_for_another) == [True]


# ----- training ------------------------------------------------------------------------------------------------------


def create_engine(section):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    optimizer = {"type": "AdamW", "params": {"lr": 0.02}}
    return make_engine(model, optimizer=optimizer, zero_optimization={**section, "reduce_bucket_size": 64})


def step(engine, number, rows=4):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(number)).to(engine.device)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def steps(engine, numbers):
    return [step(engine, number) for number in numbers]


def plain(section, number):
    engine = create_engine(section)
    losses = steps(engine, range(number))
    engine.destroy()
    return losses


def a_batch_too_large(section, spare_bytes):
    engine = create_engine(section)
    losses = [step(engine, 0)]
    torch.sim.empty_cache()
    torch.sim.set_total_memory(torch.sim.memory_reserved() + spare_bytes)
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory") as caught:
        step(engine, 1, rows=1 << 12)
    told = [frame.name for frame in caught.traceback]
    del caught  # it holds the tensors of the forward
    torch.sim.set_total_memory(4 << 30)
    engine.zero_grad()  # what a backward has brought until it was left
    losses += steps(engine, [1, 2])
    engine.destroy()
    return losses, "backward" if "backward" in told else "forward" if "forward" in told else "input"


# A batch of 4096 rows takes 128 KiB, hidden layers of it 512 KiB each.
SPARE = {"input": 64 << 10, "forward": 256 << 10, "backward": 1600 << 10}


@every_section
@pytest.mark.parametrize("where", SPARE)
def test_training_goes_on_after_a_batch_that_did_not_fit(sim, section, where):
    losses, left = sim(a_batch_too_large, section, SPARE[where])[0]
    assert left == where
    assert losses == sim(plain, section, 3)[0]


def interrupted(section, folder, operations):
    """Two steps, a checkpoint, and a third step in which the device is lost; on another engine it is made again."""
    engine = create_engine(section)
    steps(engine, [0, 1])
    engine.save_checkpoint(folder)
    torch.sim.synchronize()
    torch.sim.lose_device(operations)
    with pytest.raises(torch.AcceleratorError, match="sim:0 is lost"):
        steps(engine, range(2, 100))
    engine.destroy()
    torch.sim.restore_device()
    engine = create_engine(section)
    engine.load_checkpoint(folder)
    losses = steps(engine, [2, 3])
    engine.destroy()
    return losses


@every_section
@pytest.mark.parametrize("operations", swept([1, 12, 40, 77], lambda operations: operations == 40))
def test_training_resumes_after_a_device_was_lost(sim, section, operations, tmp_path):
    assert sim(interrupted, section, str(tmp_path), operations)[0] == sim(plain, section, 4)[0][2:]


SCRIPT = """
import sys
import deepspeed, torch

engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=sys.argv[-1])
for _ in range(100):
    if torch.distributed.get_rank() == 1:
        torch.sim.lose_device(20)
    loss = engine(torch.ones(2, 4, device=engine.device)).mean()
    engine.backward(loss)
    engine.step()
    print("a step was made", loss.item(), flush=True)
"""


def test_one_lost_device_ends_all_ranks(python, installed, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text('{"train_batch_size": 4, "optimizer": {"type": "Adam"}}')
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ended = subprocess.run(
        [python, "-c", "from deepspeed.launcher.runner import main; main()", "train.py", "config.json"],
        cwd=tmp_path,
        env={**kept, **installed, "DS_ACCELERATOR": "sim", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode != 0
    assert "AcceleratorError: sim:1 is lost" in ended.stderr + ended.stdout
