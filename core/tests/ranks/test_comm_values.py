"""Small values that hosts exchange: plain ones, as text in tensors, and sums of numbers for groups of a device."""

import math
import pickle
from datetime import timedelta
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import own_group
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.give_up import give_up
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.zero.step_agreement import HostSums

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


# ---- sums between hosts ----------------------------------------------------------------------------------------


def create():
    return HostSums(torch.distributed.group.WORLD)


def sums_job():
    sums = create()
    assert sums.connect()
    dist.comms_logger.configure(enabled=True)
    return sums.sum([1.0, 2.0**40 + dist.get_rank(), 0.1]), list(dist.comms_logger.comms_dict["all_reduce"])


def test_values_are_summed_in_fp64_and_recorded():
    assert run_ranks(2, sums_job) == [([2.0, 2.0**41 + 1, 0.2], [24])] * 2


def failure_job():
    sums = create()
    sums.sum([1.0])
    if dist.get_rank() == 1:
        try:
            raise ValueError("the batch is bad")
        except ValueError:
            sums.abandon()
    else:
        with pytest.raises(PeerFailed, match="rank 1 failed with ValueError: the batch is bad"):
            sums.sum([1.0])
        sums.abandon()
    total = sums.sum([3.0])
    dist.barrier()
    return total


def test_a_rank_that_fails_ends_the_sum_of_its_peers_and_all_can_go_on():
    assert run_ranks(2, failure_job, timeout_s=100) == [[6.0]] * 2


def fail_job(num_failures):
    """Rank 1 fails so often, each time before the sum that rank 0 makes. Returns what ended each sum here."""
    sums, found = create(), []
    for number in range(num_failures + 1):
        try:
            if dist.get_rank() == 1 and number < num_failures:
                raise ValueError(f"batch {number} is bad")
            found.append(sums.sum([10.0**number]))
        except (ValueError, PeerFailed) as error:
            give_up()
            found.append(str(error))
    dist.barrier()  # a rank that drops the connections may break the peer's last sum
    return found


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_each_failure_ends_one_sum_of_the_peers(num_failures):
    peer, failed = run_ranks(2, fail_job, num_failures, timeout_s=100)
    assert failed[:-1] == [f"batch {number} is bad" for number in range(num_failures)]
    assert peer[-1] == failed[-1] == [2 * 10.0**num_failures]
    for number, said in enumerate(peer[:-1]):
        assert f"rank 1 failed with ValueError: batch {number} is bad" in said


def refused_job():
    def connect(store, rank, size, timeout):
        if rank == 1:
            raise RuntimeError("no address")

    sums = HostSums(torch.distributed.group.WORLD)
    with mock.patch.object(own_group, "_connect", connect), mock.patch.object(own_group, "warn_once") as warn:
        assert not sums.connect()
        with pytest.raises(CommError, match="GLOO_SOCKET_IFNAME"):
            sums.sum([1.0])
    return warn.call_args.args[0]


def test_where_one_rank_cannot_connect_no_rank_does():
    for text in run_ranks(2, refused_job):
        assert "gloo finds no way from rank 1 of a group to the hosts of its peers (no address)" in text
