"""Plain values gathered over ranks as text in tensors."""

import math
import pickle

import pytest
import torch.distributed as dist
from deepspeed.comm.values import all_gather_values
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
