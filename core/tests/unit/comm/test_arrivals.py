"""Ranks that meet, come late and give up, in every order of their operations on the store.

Each rank is a thread that runs from one operation to the next when it is its turn; its clock counts its own turns.
"""

import random
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as torch_dist
from deepspeed.comm import values
from deepspeed.comm.values import Arrivals
from deepspeed.errors import CommError

LIMIT_S = 12
_LONG_S = 10_000


class Turns:
    """Who runs: a seed draws it."""

    def __init__(self, seed):
        self._random, self._cond = random.Random(seed), threading.Condition()
        self._running, self._current, self._rank = set(), None, threading.local()
        self._times_s = {}

    def run(self, jobs):
        """Results of `jobs`, one per rank; an error is a result."""
        results = [None] * len(jobs)

        def of_rank(rank):
            self._rank.number = rank
            self.wait()
            try:
                results[rank] = jobs[rank]()
            except CommError as error:
                results[rank] = error
            finally:
                with self._cond:
                    self._running.discard(rank)
                    self._next()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(len(jobs))]
        self._running, self._times_s = set(range(len(jobs))), dict.fromkeys(range(len(jobs)), 0)
        self._current = 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def wait(self):
        """Let another rank run, and return when it is this one's turn."""
        rank = self._rank.number
        with self._cond:
            if self._current == rank:
                self._times_s[rank] += 1
                self._next()
            self._cond.wait_for(lambda: self._current == rank)

    def now_s(self):
        return self._times_s[self._rank.number]

    def _next(self):
        self._current = self._random.choice(sorted(self._running)) if self._running else None
        self._cond.notify_all()


class TurnStore:
    """A store, each operation of which takes a turn."""

    def __init__(self, turns):
        self._turns, self._store = turns, torch_dist.HashStore()

    def __getattr__(self, name):
        operation = getattr(self._store, name)

        def in_turn(*args):
            self._turns.wait()
            return operation(*args)

        return in_turn


@pytest.fixture
def create_ranks(monkeypatch):
    """`Arrivals` of each rank of a world, and the `Turns` by which they run: `create_ranks(world_size, seed)`."""

    def create(world_size, seed):
        turns = Turns(seed)
        store, made = TurnStore(turns), []
        monkeypatch.setattr(torch_dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(torch_dist, "get_rank", lambda: turns._rank.number)
        monkeypatch.setattr(values, "time", SimpleNamespace(monotonic=turns.now_s, sleep=lambda _: turns.wait()))
        monkeypatch.setattr(values.parted, "WARNING_S", _LONG_S)
        monkeypatch.setattr(values.parted, "NOTED_S", _LONG_S)
        monkeypatch.setattr(values.parted, "FIRST_LOOK_S", _LONG_S)
        monkeypatch.setattr(values, "ended_of", lambda ranks: [])
        for _ in range(world_size):
            monkeypatch.setattr(values, "_num_made", {"a group": 0})
            made.append(Arrivals(range(world_size), "a group", LIMIT_S))
        return made, turns

    return create


def have_met(results):
    """All have, in the same round."""
    return isinstance(results[0], int) and len(set(results)) == 1


def come_late(turns, rank, num_turns):
    for _ in range(num_turns):
        turns.wait()
    return rank.wait_for_all("save")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_comes_as_others_give_up_leaves_all_ranks_able_to_meet(create_ranks, world_size):
    outcomes = set()
    for seed in range(60):
        ranks, turns = create_ranks(world_size, seed)
        late = [0] * (world_size - 1) + [LIMIT_S + 2 * world_size]
        for num_turns in (late, late[::-1]):
            calls = zip(ranks, num_turns, strict=True)
            first = turns.run([lambda rank=rank, num=num: come_late(turns, rank, num) for rank, num in calls])
            outcomes.add(tuple(isinstance(found, int) for found in first))
            for error in first:
                assert isinstance(error, int) or "rank" in str(error).partition(": ")[2].partition("Every")[0]
        for rank in ranks:
            rank.limit_s = _LONG_S
        for _ in range(3):
            assert have_met(turns.run([lambda rank=rank: rank.wait_for_all("save") for rank in ranks]))
    assert {(True,) * world_size, (False,) * world_size} <= outcomes


def test_a_rank_that_comes_after_another_gave_up_says_so(create_ranks):
    (first, late), turns = create_ranks(2, seed=0)

    def give_up():
        with pytest.raises(CommError, match="rank 0 called save and waited for 12 s: rank 1 has not called it"):
            first.wait_for_all("save")

    assert turns.run([give_up, lambda: None]) == [None, None]
    _, error = turns.run([lambda: None, lambda: late.wait_for_all("save")])
    assert "rank 1 called save and waited for 12 s: rank 0 has called it and given up. Every rank" in str(error)
    first.limit_s = late.limit_s = _LONG_S
    assert have_met(turns.run([lambda rank=rank: rank.wait_for_all("save") for rank in (first, late)]))


def test_keys_of_past_calls_are_deleted(create_ranks):
    ranks, turns = create_ranks(2, seed=1)
    store = values.torch_dist.distributed_c10d._get_default_store()._store
    for _ in range(4):
        assert have_met(turns.run([lambda rank=rank: rank.wait_for_all("save") for rank in ranks]))
        assert store.num_keys() <= 4  # count and end of the last round, and the last round of each rank


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_has_ended_is_not_waited_for(create_ranks, monkeypatch, seed):
    ranks, turns = create_ranks(3, seed)
    assert have_met(turns.run([lambda rank=rank: rank.wait_for_all("save") for rank in ranks]))
    monkeypatch.setattr(values, "ended_of", lambda ranks: [1])
    found = turns.run([lambda: ranks[0].wait_for_all("save"), lambda: None, lambda: ranks[2].wait_for_all("save")])
    assert all("rank 1 has ended without it" in str(each) for each in (found[0], found[2]))


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_whose_signal_is_only_noted_waits_on(create_ranks, monkeypatch, seed):
    ranks, turns = create_ranks(2, seed)
    held = ["SIGUSR1"] * 3
    first = None
    for rank in ranks:
        rank.limit_s = _LONG_S

    def come_first():
        nonlocal first
        first = threading.current_thread().name
        return ranks[0].wait_for_all("save")

    monkeypatch.setattr(values, "any_held", lambda: bool(held) and threading.current_thread().name == first)
    monkeypatch.setattr(values, "handle_held", held.pop)
    assert have_met(turns.run([come_first, lambda: come_late(turns, ranks[1], 6)]))
    assert len(held) < 3
    assert have_met(turns.run([lambda rank=rank: rank.wait_for_all("save") for rank in ranks]))


def test_a_rank_whose_signal_raises_leaves_the_others_able_to_meet(create_ranks, monkeypatch):
    ranks, turns = create_ranks(2, seed=0)
    first = None

    def come_first():
        nonlocal first
        first = threading.current_thread().name
        with pytest.raises(KeyboardInterrupt):
            ranks[0].wait_for_all("save")
        monkeypatch.undo()

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(values, "any_held", lambda: threading.current_thread().name == first)
    monkeypatch.setattr(values, "handle_held", interrupt)
    assert turns.run([come_first, lambda: None]) == [None, None]
