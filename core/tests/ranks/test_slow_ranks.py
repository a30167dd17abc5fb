"""`watch.slow_rank_window`: a rank that does more work than its peers is named, and equal ranks are not."""

import logging
import time
from unittest import mock

import pytest
import torch
from deepspeed.comm.record import waits
from deepspeed.log import logger
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.profiling.timer import HostStopwatch
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from torch import nn

WINDOW, NUM_STEPS = 3, 7  # two windows after the first step
WORK = 40  # products of matrices of the slow rank, in place of one


class Busy(nn.Module):
    """A layer that does `num_products` products of matrices besides its own."""

    def __init__(self, num_products=1):
        super().__init__()
        self.num_products, self.layer = num_products, nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(self.num_products):
            torch.mm(torch.ones(320, 320), torch.ones(320, 320))
        return self.layer(x)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def train(stage, slow, kind="engine", counts_work=False, factor=2.5):
    """What this rank logs of slow ranks. With `counts_work` the clock is that of the processor's work, which other
    processes of the machine do not slow down."""
    torch.manual_seed(0)
    rank, lines = torch.distributed.get_rank(), Lines()
    num_products = WORK if rank == slow else 1
    keys = {"watch": {"slow_rank_window": WINDOW, "slow_rank_factor": factor}}
    keys["zero_optimization"] = {"stage3_param_persistence_threshold": 0}
    logger.addHandler(lines)
    try:
        clock = time.thread_time if counts_work else time.perf_counter
        with mock.patch.object(HostStopwatch, "_now_s", side_effect=clock):
            if kind == "pipeline":
                net = PipelineModule([LayerSpec(Busy, num_products)] * 2, num_stages=2, loss_fn=nn.MSELoss())
            else:
                net = nn.Sequential(Busy(num_products), nn.Linear(64, 64))
            engine = make_engine(net, stage, **keys)
            x = torch.ones(4, 64)
            for _ in range(NUM_STEPS):
                if kind == "pipeline":
                    engine.train_batch(iter([(x, x)] * 4))
                    continue
                engine.backward(engine(x).square().mean())
                engine.step()
            engine.destroy()
    finally:
        logger.removeHandler(lines)
    assert not waits.is_watched
    return [line for line in lines.found if "slow_rank_window" in line]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_rank_that_does_more_is_named_on_the_first_rank(stage):
    first, second = run_ranks(2, train, stage, 1, "engine", True)
    assert [line.partition(" took ")[0] for line in first] == [
        "watch.slow_rank_window: steps 2 to 4: rank 1",
        "watch.slow_rank_window: steps 5 to 7: rank 1",
    ]
    assert "the median of 2 ranks" in first[0]
    assert second == []


@pytest.mark.parametrize("stage", [0, 3])
def test_equal_ranks_are_not_named(stage):
    assert run_ranks(2, train, stage, None, "engine", True) == [[], []]


def test_ranks_of_a_pipeline_are_compared_with_those_of_their_stage():
    """One rank for each stage has no peer; of two, the slow one's neighbor in the other stage waits for it."""
    assert run_ranks(2, train, 0, 1, "pipeline") == [[], []]
    first, *others = run_ranks(4, train, 0, 3, "pipeline", True)
    of_last_stage = [line for line in first if "rank 2" in line or "rank 3" in line]  # others are as fast as they are
    assert len(of_last_stage) == 2
    assert all(": rank 3 took longer than the median of 2 ranks" in line for line in of_last_stage)
    assert others == [[], [], []]
