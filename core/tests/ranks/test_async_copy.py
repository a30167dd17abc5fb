"""What is saved asynchronously is what there was at the call of `save_checkpoint`, whoever changes it next.

In these tests the copy of master weights and states is held until something waits for it. A change that waits for
nothing comes before the copy, every time.
"""

from contextlib import contextmanager
from threading import Event

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import CheckpointError
from deepspeed.testing.distributed import run_ranks
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed.zero import state_dict
from deepspeed.zero.redistribute import PendingTensor
from torch import nn

WORLD_SIZE = 2


def create_engine(stage, **keys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"async_save": True, **keys},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def backward(engine):
    engine.backward(engine(torch.randn(4, 7).bfloat16()).square().mean())


def train(engine):
    backward(engine)
    engine.step()


def first(engine):
    return next(engine.module.parameters())


def full_weight(engine, folder):
    safe_set_full_fp32_param(first(engine), torch.full((5, 7), 9.0))


def full_state(engine, folder):
    safe_set_full_optimizer_state(first(engine), torch.full((5, 7), 9.0), "exp_avg")


def local_weight(engine, folder):
    param = first(engine)
    safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) + 9)


def local_state(engine, folder):
    param = first(engine)
    safe_set_local_optimizer_state(param, safe_get_local_optimizer_state(param, "exp_avg") + 9, "exp_avg")


def step(engine, folder):
    backward(engine)
    engine.step()


def step_of_the_optimizer(engine, folder):
    backward(engine)
    engine.optimizer.step()


def failed_step(engine, folder):
    backward(engine)
    update = engine.optimizer.optimizer.step

    def fail(*args, **kwargs):
        update(*args, **kwargs)
        raise RuntimeError("no second batch")

    engine.optimizer.optimizer.step = fail
    with pytest.raises(RuntimeError, match="no second batch"):
        engine.step()


def gathered(engine, folder):
    with deepspeed.zero.GatheredParameters([first(engine)], modifier_rank=0), torch.no_grad():
        first(engine).fill_(9)


def module_weights(engine, folder):
    values = {name: torch.full_like(param, 9.0) for name, param in engine.module.named_parameters()}
    engine.load_module_state_dict({"module": values})


def optimizer_states(engine, folder):
    state = engine.optimizer.state_dict()
    for value in tensors_in(state):
        value.fill_(9)
    engine.optimizer.load_state_dict(state)


def load(engine, folder):
    engine.load_checkpoint(folder, "first")


def another_save(engine, folder):
    engine.save_checkpoint(folder, "another")
    step(engine, folder)


def moved(engine, folder):
    engine.offload_states(pin_memory=False)
    assert not engine.checkpointer._background._process.memory._places  # also where nothing has to move
    engine.reload_states()
    step(engine, folder)


def destroyed(engine, folder):
    optimizer = engine.optimizer.optimizer
    states = list(optimizer.state.values())
    engine.destroy()
    for state in states:
        state["exp_avg"].fill_(9)


@contextmanager
def held_copies(engine):
    """Copies begin when something waits for them. Yields what lets them begin."""
    may_begin, copy = Event(), PendingTensor.copy_to
    sharding, checkpointer = engine.sharding, engine.checkpointer

    def begin_and(method):
        def call(*args):
            may_begin.set()
            return method(*args)

        return call

    def held(self, target):
        if self.is_held:
            assert may_begin.wait(60)
        copy(self, target)

    PendingTensor.copy_to = held
    sharding.states.wait_for_copy = begin_and(sharding.states.wait_for_copy)
    checkpointer._background.finish = begin_and(checkpointer._background.finish)
    checkpointer._background.close = begin_and(checkpointer._background.close)
    try:
        yield may_begin
    finally:
        may_begin.set()
        PendingTensor.copy_to = copy


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key])
    elif isinstance(value, list):
        for each in value:
            yield from tensors_in(each)


def change_job(folder, stage, change):
    engine = create_engine(stage)
    train(engine)
    engine.save_checkpoint(folder, "first")
    train(engine)
    engine.wait_for_checkpoint()
    expected = state_dict.collect(engine.sharding)
    with held_copies(engine) as may_begin:
        engine.save_checkpoint(folder, "second")
        assert not may_begin.is_set()
        change(engine, folder)
        may_begin.set()
        if change is not destroyed:
            engine.wait_for_checkpoint()
            engine.destroy()
    path = f"{folder}/second/bf16_zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"
    found = torch.load(path, weights_only=True)["optimizer_state_dict"]
    pairs = zip(tensors_in(expected), tensors_in({key: found[key] for key in expected}), strict=True)
    return [torch.equal(one, other) for one, other in pairs]


WAYS = (
    step, step_of_the_optimizer, failed_step, full_weight, full_state, local_weight, local_state, module_weights,
    optimizer_states, load, another_save, moved, destroyed,
)  # fmt: skip
CASES = [
    *(pytest.param(1, way, id=f"1-{way.__name__}") for way in WAYS),
    *(pytest.param(3, way, id=f"3-{way.__name__}") for way in (step, local_weight, gathered)),
    *(pytest.param(2, way, id=f"2-{way.__name__}", marks=pytest.mark.sweep) for way in WAYS),
    *(
        pytest.param(3, way, id=f"3-{way.__name__}", marks=pytest.mark.sweep)
        for way in WAYS
        if way not in (step, local_weight, module_weights)
    ),
]


@pytest.mark.parametrize(("stage", "change"), CASES)
def test_a_change_comes_after_the_copy(tmp_path, stage, change):
    for same in run_ranks(WORLD_SIZE, change_job, str(tmp_path), stage, change):
        assert len(same) > 2
        assert all(same)


def own_change_job(folder):
    """The user writes into the optimizer's state himself, on one rank, before it is copied."""
    engine = create_engine(1)
    train(engine)
    engine.save_checkpoint(folder, "first")
    train(engine)
    engine.wait_for_checkpoint()
    with held_copies(engine):
        engine.save_checkpoint(folder, "second")
        if dist.get_rank() == 1:
            next(iter(engine.optimizer.state.values()))["exp_avg"].add_(1)
        with pytest.raises(CheckpointError) as raised:
            engine.wait_for_checkpoint()
    engine.save_checkpoint(folder, "third")  # goes on
    latest = engine.load_checkpoint(folder)[0]
    engine.destroy()
    return str(raised.value), latest


def test_a_change_that_does_not_wait_fails_the_save(tmp_path):
    first, second = run_ranks(WORLD_SIZE, own_change_job, str(tmp_path))
    assert "the save was given up" in first[0]
    assert "changed in place while they were copied" in second[0]
    assert "third" in first[1]
    assert not (tmp_path / "second").exists()


def weights_job(folder, stage):
    """Weights that modules compute with are copied before the call returns: users change them without a word."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"async_save": True},
    }
    engine = deepspeed.initialize(model=nn.Linear(7, 5), config=config)[0]
    weight = engine.module.weight
    expected = weight.detach().clone()
    with held_copies(engine):
        engine.save_checkpoint(folder, "t")
        weight.data.fill_(9)
        engine.load_checkpoint(folder, "t")
    same = torch.equal(engine.module.weight, expected)
    engine.destroy()
    return same


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_may_change_at_once(tmp_path, stage):
    assert all(run_ranks(WORLD_SIZE, weights_job, str(tmp_path), stage))
