"""Asynchronous saving by the engines of two ranks, whose writer processes agree by themselves."""

import os
import shutil
import signal

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.errors import CheckpointError
from deepspeed.testing.distributed import run_ranks
from torch import nn

WORLD_SIZE = 2


def create_engine(stage, nebula=None, **keys):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"async_save": True, **keys},
        "nebula": nebula or {},
    }
    return deepspeed.initialize(model=nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), config=config)[0]


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        loss = engine(torch.randn(4, 7, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def writer_of(engine):
    return engine.checkpointer._background._process._process.pid


def resume_job(folder, stage):
    engine = create_engine(stage)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    expected = train(engine, 3, 6)  # while it is written
    engine.save_checkpoint(folder, "later")  # waits for the one before
    engine.load_checkpoint(folder, "global_step3")
    found = train(engine, 3, 6)
    engine.destroy()
    return expected, found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_resumes_from_what_was_saved_while_it_went_on(tmp_path, stage):
    for expected, found in run_ranks(WORLD_SIZE, resume_job, str(tmp_path), stage):
        assert found == expected
    tags = saved_tags(tmp_path)
    assert sorted(tag.name for tag in tags) == ["global_step3", "later"]
    assert (tmp_path / "latest").read_text() == "later"
    for tag in tags:
        assert len(tag.index.files) == {0: 1, 2: 3, 3: 4}[stage]
        assert not tag.faults(content=True)
    assert not layout.unfinished_in(tmp_path)


def nebula_job(near, far):
    nebula = {"enabled": True, "persistent_storage_path": far, "num_of_version_in_retention": 2}
    engine = create_engine(1, nebula=nebula, async_save=False, keep_last=1)
    for step in range(4):
        train(engine, step, step + 1)
        engine.save_checkpoint(near)
    expected = train(engine, 4, 6)
    engine.destroy()
    engine = create_engine(1, nebula=nebula, async_save=False)
    near_path, _ = engine.load_checkpoint(near)
    found = train(engine, 4, 6)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(near)
    dist.barrier()
    far_path, _ = engine.load_checkpoint(near)
    assert train(engine, 4, 6) == expected == found
    engine.destroy()
    return near_path, far_path


def test_nebula_saves_asynchronously_in_two_tiers_and_loads_the_nearest(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    for paths in run_ranks(WORLD_SIZE, nebula_job, str(near), str(far)):
        assert paths == tuple(str(tier / "global_step4" / "mp_rank_00_model_states.pt") for tier in (near, far))
    assert sorted(os.listdir(far)) == ["global_step1", "global_step4", "latest", "zero_to_fp32.py"]


def load_path_job(folder):
    engine = create_engine(1, nebula={"enabled": True, "nebula_load_path": f"{folder}/former"}, async_save=False)
    engine.save_checkpoint(f"{folder}/former", "one")
    engine.save_checkpoint(f"{folder}/own", "two")
    path, _ = engine.load_checkpoint(f"{folder}/own")
    engine.destroy()
    return path


def test_nebula_loads_from_its_load_path_alone(tmp_path):
    for path in run_ranks(WORLD_SIZE, load_path_job, str(tmp_path)):
        assert path.startswith(str(tmp_path / "former" / "one"))


def kill_job(folder, killed):
    """One rank's writer dies while it has a save to write; the other rank's learns of it."""
    engine = create_engine(2)
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    begin = BackgroundWriter.write

    def write(background, *order, **options):
        if dist.get_rank() == killed:
            os.kill(writer_of(engine), signal.SIGKILL)
        begin(background, *order, **options)

    BackgroundWriter.write = write
    try:
        train(engine, 1, 2)
        engine.save_checkpoint(folder)
    finally:
        BackgroundWriter.write = begin
    with pytest.raises(CheckpointError) as raised:
        engine.wait_for_checkpoint()
    train(engine, 2, 3)  # training goes on
    former = engine.load_checkpoint(folder)[0]
    engine.save_checkpoint(folder)
    latest = engine.load_checkpoint(folder)[0]
    engine.destroy()
    return str(raised.value), former, latest


@pytest.mark.parametrize("killed", [0, 1])
def test_a_writer_that_dies_fails_the_save_on_every_rank_and_the_former_stays(tmp_path, killed):
    for rank, (message, former, latest) in enumerate(run_ranks(WORLD_SIZE, kill_job, str(tmp_path), killed)):
        assert "global_step2 has failed" in message
        dead = "of this rank has ended with exit code -9" if rank == killed else "ended before its files were written"
        assert dead in message
        assert "global_step1" in former
        assert "global_step1" in latest  # counted from the checkpoint that was loaded
    assert os.listdir(tmp_path / "global_step1")
    assert not layout.unfinished_in(tmp_path)


def fail_job(folder):
    """Rank 1 cannot copy its states: both raise at the call, and what was begun is removed."""
    engine = create_engine(2)
    train(engine, 0, 1)
    stage = BackgroundWriter.stage

    def full(background, folder, name, files):
        stage(background, folder, name, files)
        if dist.get_rank() == 1:
            raise CheckpointError("no shared memory")

    BackgroundWriter.stage = full
    try:
        with pytest.raises(CheckpointError, match="no shared memory"):
            engine.save_checkpoint(folder)
    finally:
        BackgroundWriter.stage = stage
    dist.barrier()
    left = os.listdir(folder)
    dist.barrier()
    engine.save_checkpoint(folder)
    engine.destroy()
    return left


def test_a_rank_that_cannot_copy_its_states_fails_the_save_on_every_rank(tmp_path):
    assert run_ranks(WORLD_SIZE, fail_job, str(tmp_path)) == [[], []]
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest", "zero_to_fp32.py"]
