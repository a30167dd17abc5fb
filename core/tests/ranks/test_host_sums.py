"""Sums between hosts, for groups over a device's library: values, a rank that fails, one that cannot connect."""

from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import own_group
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.host_sums import HostSums
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks


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
    return sums.sum([3.0])


def test_a_rank_that_fails_ends_the_sum_of_its_peers_and_all_can_go_on():
    assert run_ranks(2, failure_job, timeout_s=100) == [[6.0]] * 2


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
