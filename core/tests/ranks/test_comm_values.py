"""Plain values gathered over ranks as text in tensors."""

import math
import pickle
from datetime import timedelta

import pytest
import torch.distributed as dist
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks

VALUES = [None, "", "ü \udcff \0", {"forward": 1.5, "n": [1, True, math.inf]}, "x" * 100_000, 3]


def gather_job():
    """No pickle is made or read; ranks may send texts of different sizes; a subgroup works alike."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("loads", "dumps", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, None)
        rank = dist.get_rank()
        found = [all_gather_values(value if rank else "other") for value in VALUES]
        alone = [dist.new_group([r]) for r in range(2)][rank]
        own = all_gather_values(rank, alone)
    with pytest.raises(TypeError, match="not JSON serializable"):
        all_gather_values({"f": object()})
    return found, own


def test_every_rank_gets_every_value():
    for rank, (found, own) in enumerate(run_ranks(2, gather_job)):
        assert found == [["other", value] for value in VALUES]
        assert own == [rank]


def wait_alone_job():
    """As `save_checkpoint` under `if rank == 0`."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=r"rank 0 waited for a value from every rank .* save_checkpoint"):
            all_gather_values(1, group)
    dist.barrier()


def test_a_rank_that_does_not_come_is_an_error_that_says_what_to_do():
    run_ranks(2, wait_alone_job)
