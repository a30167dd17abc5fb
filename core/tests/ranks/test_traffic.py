"""Bytes that ranks send in a step, as the comms logger counts them, are those of `docs/explanation/scale.md`."""

import deepspeed
import pytest
import torch
from deepspeed.comm import comm
from deepspeed.planning import Mesh, ModelShape, Training, estimate_traffic
from deepspeed.testing.distributed import run_ranks

WIDTH, NUM_LAYERS, MICRO_BATCHES, BYTES = 64, 4, 2, 4
NUMEL = NUM_LAYERS * WIDTH * WIDTH
#: over a ring of W ranks, in (W - 1) / W of the tensor
RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
LEAST_BYTES = 1024  # below are norms and losses, whose number does not grow with the model


def step_job(zero):
    """Bytes of the tensors in a step's collectives, by operation."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        "comms_logger": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        for _ in range(2):
            comm.comms_logger.reset()
            for _ in range(MICRO_BATCHES):
                engine.backward(engine(torch.ones(1, WIDTH)).sum())
                engine.step()
        figures = comm.comms_logger.figures()
    finally:
        comm.comms_logger.enabled = False
        comm.comms_logger.reset()
        engine.destroy()
    return {
        op: sum(size * row["count"] for size, row in sizes.items() if size >= LEAST_BYTES)
        for op, sizes in figures.items()
    }


def sent_by(moved, world_size):
    return sum(RING[op] * num_bytes for op, num_bytes in moved.items()) * (world_size - 1) / world_size


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("zero", "times"),
    [
        ({"stage": 0}, 2),
        ({"stage": 1}, 1 + 1),
        ({"stage": 2}, MICRO_BATCHES + 1),
        ({"stage": 3}, MICRO_BATCHES + 1),
        ({"stage": 3, "stage3_max_live_parameters": 1}, MICRO_BATCHES + 2 * MICRO_BATCHES),
    ],
)
def test_each_stage_sends_what_its_formula_says(world_size, zero, times):
    expected = times * BYTES * NUMEL * (world_size - 1) / world_size
    assert [sent_by(moved, world_size) for moved in run_ranks(world_size, step_job, zero)] == [expected] * world_size


def test_mics_sums_shards_over_the_copies_once_in_a_step():
    moved = run_ranks(4, step_job, {"stage": 3, "mics_shard_size": 2})[0]
    whole = BYTES * NUMEL
    assert moved == {"all_gather": whole, "reduce_scatter": MICRO_BATCHES * whole, "all_reduce": whole // 2}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_planner_has_the_same_formula(stage):
    shape = ModelShape(layers=2, hidden_size=64, heads=4, vocab_size=100, intermediate_size=128)
    sent = {
        dp: estimate_traffic(shape, Mesh(dp=dp), Training(sequence=8, micro_batch=1, stage=stage))
        for dp in (2, 4, 1024)
    }
    per_part = {(each.reduce + each.gather) / ((dp - 1) / dp) for dp, each in sent.items()}
    assert max(per_part) == pytest.approx(min(per_part))
