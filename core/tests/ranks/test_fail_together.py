"""A rank that fails at the begin of a save, or at the end of a load, lets its peers know: none waits for it."""

import os
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.errors import CheckpointError, CommError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def create_engine(stage, **section):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return make_engine(model, stage, zero_optimization=section, optimizer=ADAMW)


def on_disk(swap):
    """Keys of `zero_optimization`: of which a rank has more sub-groups than stay in memory."""
    return {"offload_optimizer": {"device": "nvme", "nvme_path": swap}, "sub_group_size": 16}


def train_step(engine):
    rank = torch.distributed.get_rank()
    engine.backward(engine(torch.full((2, 8), rank + 1.0)).square().mean())
    engine.step()


def change_and_save(folder):
    engine = create_engine(3, stage3_param_persistence_threshold=0)
    train_step(engine)
    with torch.no_grad():
        engine(torch.ones(2, 8))
        if engine.global_rank == 0:
            engine.module[0].weight.add_(1.0)  # outside of GatheredParameters
    with pytest.raises((StateError, CheckpointError)) as caught:
        engine.save_checkpoint(folder)
    assert not Path(folder, "latest").exists()
    train_step(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


def test_a_save_that_one_rank_cannot_begin(tmp_path):
    own, peers = run_ranks(2, change_and_save, str(tmp_path))
    assert "GatheredParameters" in own
    assert "rank 0" in peers
    assert own in peers


def lose_at_the_end_of_a_load(folder, swap):
    engine = create_engine(1, **on_disk(swap))
    train_step(engine)
    engine.save_checkpoint(folder)
    sharding = engine.sharding
    bring = sharding.weights_from_masters

    def lose_and_bring():
        if engine.global_rank == 0:
            (file,) = Path(swap).glob("*rank0*/optimizer.swap")
            os.unlink(file)
        bring()

    sharding.weights_from_masters = lose_and_bring
    with pytest.raises((OSError, CheckpointError)) as caught:
        engine.load_checkpoint(folder)
    del sharding.weights_from_masters
    for use in (lambda: engine(torch.ones(2, 8)), lambda: engine.save_checkpoint(folder)):
        with pytest.raises(StateError, match="load_checkpoint failed before all was restored"):
            use()
    engine.destroy()
    return str(caught.value)


def test_a_load_that_one_rank_cannot_end(tmp_path):
    swap = tmp_path / "swap"
    swap.mkdir()
    own, peers = run_ranks(2, lose_at_the_end_of_a_load, str(tmp_path), str(swap))
    assert "swap file" in own
    assert "rank 0" in peers


def fail_in_an_update(folder, section):
    engine = create_engine(2, **section)
    train_step(engine)
    engine.save_checkpoint(folder)
    train_step(engine)
    expected = [param.detach().clone() for param in engine.module.parameters()]
    step = engine.basic_optimizer.step

    def step_and_fail(*args, **kwargs):
        step(*args, **kwargs)
        raise MemoryError("planted")

    engine.basic_optimizer.step = step_and_fail
    with pytest.raises(MemoryError):
        train_step(engine)
    engine.basic_optimizer.step = step
    refused = [
        lambda: engine(torch.ones(2, 8)),
        lambda: engine.save_checkpoint(folder),
        lambda: engine.save_16bit_model(folder),
        lambda: deepspeed.utils.safe_get_full_fp32_param(engine.module[0].weight),
    ]
    for use in refused:
        with pytest.raises(StateError, match="the last step failed inside its update.*load a checkpoint"):
            use()
    engine.load_checkpoint(folder, load_optimizer_states=False)  # moments may still be of two steps
    with pytest.raises(StateError):
        engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    train_step(engine)
    for param, value in zip(engine.module.parameters(), expected, strict=True):
        assert torch.equal(param, value)
    engine.destroy()


@pytest.mark.parametrize("place", ["beside the weights", "nvme"])
def test_weights_of_two_steps_are_not_saved(tmp_path, place):
    """A load of all states makes the run whole again."""
    swap = tmp_path / "swap"
    swap.mkdir()
    run_ranks(2, fail_in_an_update, str(tmp_path), on_disk(str(swap)) if place == "nvme" else {})


def fail_in_an_update_and_go_on(folder, stage, num_tries):
    engine = create_engine(stage, stage3_param_persistence_threshold=0)
    engine.save_checkpoint(folder)
    step = engine.basic_optimizer.step
    if engine.global_rank == 0:

        def fail(*args, **kwargs):
            raise MemoryError("planted")

        engine.basic_optimizer.step = fail
    failures = []
    for _ in range(num_tries):
        try:
            train_step(engine)
        except (MemoryError, StateError, CommError) as error:
            failures.append(type(error))
    engine.basic_optimizer.step = step
    engine.load_checkpoint(folder)
    train_step(engine)
    weights = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return failures, weights


@pytest.mark.parametrize("stage", range(4))
def test_peers_of_a_rank_whose_update_failed_do_not_wait_for_it(tmp_path, stage):
    """It refuses every later step, which peers begin: their own update may have been made."""
    (own, weights), (peers, others) = run_ranks(2, fail_in_an_update_and_go_on, str(tmp_path), stage, 4, timeout_s=40)
    assert own == [MemoryError, StateError, StateError, StateError]
    assert len(peers) >= 3
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("stage", range(4))
def test_after_a_load_ranks_are_in_the_same_step(tmp_path, stage):
    """Peers whose update was made have not heard of the failure, and would hear of it in the step after the load."""
    (own, weights), (_, others) = run_ranks(2, fail_in_an_update_and_go_on, str(tmp_path), stage, 1, timeout_s=40)
    assert own == [MemoryError]
    assert all(torch.equal(weights[name], others[name]) for name in weights)
