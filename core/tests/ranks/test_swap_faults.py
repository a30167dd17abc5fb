"""Faults of the disk that swap files are on: named, on every rank, and the last checkpoint loads in a new engine.

One of two ranks meets the fault; the other one raises too, and does not wait for it.
"""

import os
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import CommError, DeepSpeedError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.offload import create_engine, loss_of, train, weights_of
from deepspeed.testing.tiers import swept
from deepspeed.zero.offload.nvme import NvmePlacement
from deepspeed.zero.offload.policy import SwappedShards

NAMES = {"offload_optimizer": "optimizer.swap", "offload_param": "parameters.swap"}


def section_of(what, path):
    keys = {"max_in_cpu": 0, "buffer_count": 2} if what == "offload_param" else {"pipeline_read": True}
    return {what: {"device": "nvme", "nvme_path": str(path), **keys}, "stage3_max_reuse_distance": 0}


def swap_file_of_this_rank(what, path):
    (file,) = Path(path).glob(f"*_rank{dist.get_rank()}_*/{NAMES[what]}")
    return file


def remove(file):
    file.unlink()


def remove_folder(file):
    shutil.rmtree(file.parent)


def remove_nvme_path(file):
    shutil.rmtree(file.parent.parent)


def cut_off(file):
    os.truncate(file, 4096)


def replace(file):
    content = file.read_bytes()
    file.rename(f"{file}.old")
    file.write_bytes(content)


def make_unreadable(file):
    if os.geteuid() == 0:  # who may read everything
        file.unlink()
        file.mkdir()
    else:
        file.chmod(0)


DAMAGES = {
    "No such file or directory": remove,
    "No such file or directory: its folder": remove_folder,
    "No such file or directory: nvme_path": remove_nvme_path,
    "the file was cut off": cut_off,
    "another file has taken its place": replace,
    "unreadable": make_unreadable,
}
MOMENTS = {"offload_optimizer": ("backward", "update", "write"), "offload_param": ("forward", "write", "save")}


def damage_at(moment, what, engine, damage):
    """Make `damage` happen at the moment: now, or as soon as the update has begun."""
    if moment in ("backward", "forward", "save"):
        damage()
    elif moment == "update":
        engine.backward(loss_of(engine, 20))
        engine.sharding.gradients.reduce()
        damage()
    else:
        owner, name = (NvmePlacement, "store") if what == "offload_optimizer" else (SwappedShards, "write")
        write = getattr(owner, name)

        def damage_and_write(self, *args):
            setattr(owner, name, write)
            damage()
            write(self, *args)

        setattr(owner, name, damage_and_write)


def finish(engine, moment, folder):
    if moment == "save":
        engine.save_checkpoint(folder, tag="second")
    elif moment == "update":
        engine.step()
    else:
        train(engine, [2])


def fault_job(what, stage, damage, moment, rank_of_fault, path, folder):
    path = Path(path, f"rank{dist.get_rank()}")  # each has its own, as on hosts
    path.mkdir()
    engine = create_engine(stage, section_of(what, path), freezes=moment == "save")  # a frozen weight has no master
    train(engine, range(2))
    engine.save_checkpoint(folder)
    weights = weights_of(engine)
    file = swap_file_of_this_rank(what, path)
    fails = dist.get_rank() == rank_of_fault
    damage_at(moment, what, engine, (lambda: DAMAGES[damage](file)) if fails else lambda: None)
    with pytest.raises(OSError if fails else DeepSpeedError) as info:
        finish(engine, moment, folder)
    if fails:
        assert info.value.filename == str(file)
        assert "at offset " in str(info.value), info.value
        assert damage.partition(":")[0] in str(info.value) or damage == "unreadable"
        assert "load the last checkpoint" in str(info.value)
    else:
        assert isinstance(info.value, CommError) or moment == "save", info.value
        assert f"rank {rank_of_fault}" in str(info.value)
    if moment == "backward" and stage < 3:
        assert all(map(torch.equal, weights, engine.module.parameters())), "those in memory are of the last step"
    if what == "offload_param":
        with pytest.raises(OSError if fails else CommError):
            engine.destroy()
    engine.destroy()
    for own in (path, path.parent):
        own.mkdir(exist_ok=True)
    fresh = create_engine(stage, section_of(what, path), freezes=moment == "save", seed=8)
    fresh.load_checkpoint(folder)
    assert all(map(torch.equal, weights_of(fresh), weights))
    train(fresh, [2])
    fresh.destroy()


CASES = [
    (what, stage, damage, moment, rank)
    for what, stage, damage, rank in product(NAMES, (1, 2, 3), DAMAGES, (0, 1))
    for moment in MOMENTS[what]
    if stage == 3 or what == "offload_optimizer"
]


def is_kept(what, stage, damage, moment, rank):
    """Every damage once for each of both, at every moment, stage and rank."""
    number = list(DAMAGES).index(damage)
    its_stage = 1 + number // 2 if what == "offload_optimizer" else 3
    return (stage, moment, rank) == (its_stage, MOMENTS[what][number % 3], number // 3)


@pytest.mark.parametrize(("what", "stage", "damage", "moment", "rank_of_fault"), swept(CASES, is_kept))
def test_a_fault_of_one_disk_is_raised_on_all_ranks(tmp_path, what, stage, damage, moment, rank_of_fault):
    run_ranks(2, fault_job, what, stage, damage, moment, rank_of_fault, str(tmp_path), str(tmp_path / "checkpoint"))
