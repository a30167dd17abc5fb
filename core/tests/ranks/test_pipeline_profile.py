"""`partition_method="profile"`: stages take equally long, and all ranks make the same cuts."""

from unittest.mock import patch

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.pipe import layers as pipe_layers
from deepspeed.testing.distributed import run_ranks
from torch import nn

WIDTH = 4


class Clock:
    """Time that passes in layers only."""

    seconds = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.seconds


class Timed(nn.Linear):
    """As many parameters as its neighbors, and `seconds` of work: a list of them by rank."""

    def __init__(self, seconds):
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x):
        Clock.seconds += self.seconds[dist.get_rank()]
        return torch.tanh(super().forward(x))


def cuts_job(seconds, num_stages, interleave, method):
    deepspeed.init_distributed()
    layers = [LayerSpec(Timed, each) for each in seconds]
    with patch.object(pipe_layers, "time", Clock):
        model = PipelineModule(
            layers,
            num_stages=num_stages,
            loss_fn=nn.functional.mse_loss,
            partition_method=method,
            sample_inputs=torch.ones(2, WIDTH),
            interleave=interleave,
        )
    is_clean = all(param.grad is None for param in model.parameters())
    return list(model.parts), is_clean


@pytest.mark.parametrize(
    ("world", "seconds", "num_stages", "interleave", "cuts"),
    [
        (2, [1, 1, 1, 1, 1, 5], 2, 1, [0, 5, 6]),
        (2, [6, 1, 1, 1, 1, 2], 2, 1, [0, 1, 6]),
        (3, [2, 1, 1, 4, 2, 2], 3, 1, [0, 3, 4, 6]),
        (2, [2, 1, 1, 4, 2, 2], 2, 2, [0, 3, 4, 5, 6]),
    ],
)
def test_stages_take_equally_long(world, seconds, num_stages, interleave, cuts):
    """The first rank's times count; those of the others are the other way round here."""
    times = [[ahead] + [behind] * (world - 1) for ahead, behind in zip(seconds, reversed(seconds), strict=True)]
    for found, is_clean in run_ranks(world, cuts_job, times, num_stages, interleave, "profile"):
        assert found == cuts
        assert is_clean


def test_equal_numbers_of_parameters_are_another_cut():
    times = [[each, each] for each in [1, 1, 1, 1, 1, 5]]
    assert run_ranks(2, cuts_job, times, 2, 1, "parameters")[0][0] == [0, 3, 6]
