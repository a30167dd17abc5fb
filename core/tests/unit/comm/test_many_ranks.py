"""What many ranks ask of the job's store: so much per rank, however many they are.

Ranks and their clock are simulated (`deepspeed.testing.many_ranks`), so the counts are exact.
"""

import pytest
from deepspeed.comm import parted
from deepspeed.comm.failure import FailureRecord
from deepspeed.comm.values import Arrivals, name_of
from deepspeed.comm.watch import Collective, Issued
from deepspeed.testing.many_ranks import ManyRanks
from torch import float32

FEW, MANY = 32, 128


def per_rank(world_size, prepare, starts_s=None):
    """Operations and bytes per rank of the job that `prepare(ranks)` gives."""
    ranks = ManyRanks(world_size)
    with ranks.simulated():
        ranks.run(prepare(ranks), starts_s and starts_s(world_size))
    return ranks.store.num_operations / world_size, ranks.store.num_bytes / world_size


def assert_linear(prepare, starts_s=None, *, bytes_factor=1.2):
    """Of the whole job."""
    few, many = (per_rank(size, prepare, starts_s) for size in (FEW, MANY))
    assert many[0] <= 1.2 * few[0], (few, many)
    assert many[1] <= bytes_factor * few[1], (few, many)


def meeting(ranks):
    return lambda rank: Arrivals(range(ranks.world_size), "a group", 600.0).wait_for_all("save")


def first_is_late(seconds):
    return lambda world_size: [seconds] + [0.0] * (world_size - 1)


def test_a_meeting_at_one_time_asks_a_constant_per_rank():
    assert_linear(meeting)


@pytest.mark.parametrize("late_s", [0.5, 5.0, 15.0])
def test_a_meeting_with_one_late_rank_asks_a_constant_per_rank(late_s):
    # each rank notes for which ranks it waits, and few ask for all of these
    assert_linear(meeting, first_is_late(late_s), bytes_factor=1.2 if late_s < 1 else 4.0)


def test_a_few_ranks_say_who_is_missing(lines):
    per_rank(MANY, meeting, first_is_late(12.0))
    warned = [line for _, line in lines if "save waits: rank 0 has not called it" in line]
    assert len(warned) == 2 * parted.FEW - 1  # the missing one is at an end of the group


def looks(ranks, differs):
    """Waits in a collective of all ranks: three looks. `differs`: rank 1 has issued another one."""

    found = []

    def look(rank):
        issued = Issued(rank, ranks.world_size, FailureRecord(None))
        numel = 8 if differs and rank == 1 else 4
        for _ in range(200):
            issued.add(Collective("all-reduce", numel, float32, "gradients"))
        for _ in range(3):
            ranks.sleep(1.0)
            if crossing := issued.crossing():
                found.append(crossing)
        return found

    return look


@pytest.fixture
def named_group(monkeypatch):
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_process_group_name", lambda _: "a group")


def test_ranks_that_wait_long_in_a_collective_ask_a_constant_per_rank(named_group):
    assert_linear(lambda ranks: looks(ranks, differs=False))


def test_of_many_ranks_one_that_makes_another_collective_is_found(named_group):
    ranks = ManyRanks(MANY)
    with ranks.simulated():
        found = ranks.run(looks(ranks, differs=True))[0]
    assert any("rank 1 makes all-reduce of 8" in each for each in found), found[:3]


@pytest.mark.parametrize("num_elsewhere", [1, MANY // 2])
def test_of_many_ranks_those_that_wait_elsewhere_are_found(num_elsewhere):
    """One or half of the ranks are in another call; the others look for them."""
    ranks = ManyRanks(MANY)
    members = list(range(MANY))

    def wait(rank):
        call = "save" if rank < num_elsewhere else "load"
        parted.put_note(ranks.store, call, call, f"end of {call} {rank}", members)
        for _ in range(3):
            ranks.sleep(1.0)
            if found := parted.parting(members, call, lambda _, note: note.kind != call, calls=True, kind=call):
                return found
        return ""

    with ranks.simulated():
        found = ranks.run(wait)
    assert any("they wait for each other" in each for each in found)
    assert ranks.store.num_operations < MANY * (4 + 3 * (2 + 3 * parted.FEW))


def test_names_of_ranks_are_short_and_differ():
    assert name_of([0, 1, 2, 3]) == "0_1_2_3"
    names = {name_of(range(first, 1024)) for first in range(512)}
    assert len(names) == 512
    assert max(map(len, names)) < 40
