"""What a rank logs about the failure of another one, beside its own."""

from types import SimpleNamespace

import pytest
import torch.distributed as torch_dist
from deepspeed.comm import failure
from deepspeed.comm.failure import FailureRecord, PeerFailed
from deepspeed.errors import CommError

FIRST = "rank 0 failed with ValueError: bad batch"


@pytest.fixture
def fail(monkeypatch, lines):
    """`fail(error)` of rank 1, in two groups, after rank 0 has failed: what rank 1 logs."""
    store = torch_dist.HashStore()
    monkeypatch.setattr(torch_dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch_dist.distributed_c10d, "_get_process_group_name", lambda group: "a group")
    rank = SimpleNamespace(number=0)
    monkeypatch.setattr(failure, "num_told", 0)
    monkeypatch.setattr(failure, "_logged", (0, ""))
    monkeypatch.setattr(torch_dist, "get_rank", lambda: rank.number)
    records = [FailureRecord(SimpleNamespace()) for _ in range(2)]

    def as_rank(number, error):
        rank.number = number
        try:
            raise error
        except type(error):
            failure.tell()
            for record in records:
                record.record(0)

    as_rank(0, ValueError("bad batch"))
    assert not lines

    def second(error):
        as_rank(1, error)
        return [text for _, text in lines]

    return second


def test_a_consequence_names_the_cause(fail):
    assert fail(PeerFailed("rank 1 cannot go on", FIRST)) == [f"{FIRST}; the failure of this rank follows from that"]


def test_a_collective_that_fails_without_a_known_cause_names_what_came_first(fail):
    assert fail(CommError("closed")) == [f"{FIRST}; the failure of this rank follows from that"]


def test_ranks_that_fail_alike_say_nothing_of_each_other(fail):
    assert fail(ValueError("bad batch")) == []


def test_another_failure_that_says_the_same_is_logged_too(fail):
    error = PeerFailed("rank 1 cannot go on", FIRST)
    assert fail(error) + fail(error) == 3 * [f"{FIRST}; the failure of this rank follows from that"]


def test_a_rank_that_fails_by_itself_says_so(fail):
    wanted = f"{FIRST}; after that, and by itself, this rank failed with KeyError: 'x'"
    assert fail(KeyError("x")) == [wanted]
