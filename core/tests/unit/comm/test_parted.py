"""Notes of ranks that wait: what happens where the job's store is gone, and in waits inside of waits."""

import pytest
import torch.distributed as torch_dist
from deepspeed.comm import parted

WAIT = parted.Wait("all-reduce of 4 fp32", "of the world", 1, [0, 1])


class EndedStore:
    """As a TCPStore is when the rank that has it has ended."""

    def set(self, *_):
        raise torch_dist.DistNetworkError("Broken pipe")

    add = set


@pytest.fixture
def ended_store(monkeypatch):
    monkeypatch.setattr(torch_dist.distributed_c10d, "_get_default_store", EndedStore)
    monkeypatch.setattr(torch_dist, "get_rank", lambda: 1)
    monkeypatch.setattr(parted.Noting, "_threads_wait", False)


def test_a_wait_goes_on_where_the_rank_with_the_store_has_ended(ended_store):
    noting = parted.Noting(WAIT)
    noting.note()
    noting.end()
    assert parted.Noting._noted is None


def test_a_wait_inside_of_another_one_leaves_the_other_looked_after():
    looks = []
    with parted.looking(WAIT, lambda: looks.append("outer")):
        with parted.looking(WAIT, lambda: looks.append("inner")):
            parted._look_after_waits(float("inf"))
        parted._look_after_waits(float("inf"))
    parted._look_after_waits(float("inf"))
    assert looks == ["inner", "outer"]
