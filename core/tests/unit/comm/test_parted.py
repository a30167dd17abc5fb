"""Notes of ranks that wait: what happens where the job's store is gone, and in waits inside of waits."""

import threading

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


class Store:
    """The job's, of ranks that this process is one after the other."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, number):
        self.values[key] = self.values.get(key, 0) + number
        return self.values[key]


@pytest.fixture
def as_rank(monkeypatch):
    """Lets the process be another rank, whose threads have waited for others."""
    store = Store()
    monkeypatch.setattr(torch_dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(parted.Noting, "_threads_wait", True)

    def become(rank, num_started):
        monkeypatch.setattr(torch_dist, "get_rank", lambda: rank)
        monkeypatch.setattr(parted, "_all_started", lambda: {WAIT.name: num_started})
        monkeypatch.setattr(parted.Noting, "_noted", None)

    return become


def note_long_wait(wait, in_thread=False):
    def work():
        with parted.in_call("GatheredParameters"):
            noting = parted.Noting(wait)
            noting._began_s -= 2 * parted.WARNING_S
            noting.note()

    if in_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()


@pytest.mark.parametrize("in_thread", [False, True])
def test_where_threads_wait_notes_still_say_who_is_there_and_decide_nothing(as_rank, lines, in_thread):
    wait = WAIT._replace(ranks=[0, 1, 2])
    as_rank(2, 1)
    note_long_wait(wait, in_thread)
    as_rank(0, 1)
    note_long_wait(wait, in_thread)
    assert lines[-1][1].startswith("GatheredParameters waits in all-reduce of 4 fp32: rank 1 is not in it")
    as_rank(1, 0)
    assert parted.parting([0, 1, 2], "a call", lambda *_: True) == ""


def test_a_wait_inside_of_another_one_leaves_the_other_looked_after():
    looks = []
    with parted.looking(WAIT, lambda: looks.append("outer")):
        with parted.looking(WAIT, lambda: looks.append("inner")):
            parted._look_after_waits(float("inf"))
        parted._look_after_waits(float("inf"))
    parted._look_after_waits(float("inf"))
    assert looks == ["inner", "outer"]
