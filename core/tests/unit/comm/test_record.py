"""The comms logger."""

import re

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import comms_logger
from deepspeed.comm.backend import DONE, Followed
from deepspeed.comm.comm import CommsLogger
from deepspeed.comm.record import RecordedGroup, recorded


@recorded
def exchange(tensor, tensors=(), async_op=False):
    return tensor.numel()


@pytest.fixture(autouse=True)
def fresh():
    yield
    comms_logger.reset()
    comms_logger.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False)


def test_off_by_default():
    assert exchange(torch.zeros(4)) == 4
    assert comms_logger.comms_dict == {}


def test_counts_by_operation_and_size():
    dist.configure(enabled=True)
    for _ in range(3):
        exchange(torch.zeros(4))
    exchange(tensor=torch.zeros(8, dtype=torch.bfloat16))
    exchange(torch.zeros(1), [torch.zeros(4), torch.zeros(4)])
    rows = comms_logger.comms_dict["exchange"]
    assert {size: row[0] for size, row in rows.items()} == {16: 4, 32: 1}
    assert [[len(column) for column in row[1:]] for row in rows.values()] == [[4] * 3, [1] * 3]
    assert all(value > 0 for row in rows.values() for column in row[1:] for value in column)


def test_the_summary_has_the_documented_columns():
    dist.configure(enabled=True)
    comms_logger.add("all_reduce", 3 << 20, 0.004)
    comms_logger.add("all_reduce", 3 << 20, 0.002)
    comms_logger.add("broadcast", 2048, 0.001)
    table = dist.log_summary().splitlines()
    assert re.split(r"\s{2,}", table[0]) == [
        *("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)"),
        *("tput_avg (Gbps)", "busbw_avg (Gbps)"),
    ]
    assert table[1] == "all_reduce"
    assert re.split(r"\s{2,}", table[2].strip()) == ["3.0 MB", "2", "6.00", "3.00", "18.87", "0.00"]  # of one rank
    assert re.split(r"\s{2,}", table[4].strip())[:3] == ["2.0 KB", "1", "1.00"]


def test_bandwidths_of_more_ranks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    logger = CommsLogger()
    for op in ("all_reduce", "all_gather_into_tensor", "broadcast"):
        logger.add(op, 10**9, 1.0)
    bandwidths = {op: sizes[10**9][2:] for op, sizes in logger.comms_dict.items()}
    assert bandwidths == {
        "all_reduce": [[16], [12]],
        "all_gather_into_tensor": [[8], [6]],
        "broadcast": [[8], [8]],
    }


def test_only_the_operations_asked_for():
    dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}})
    exchange(torch.zeros(4))
    assert comms_logger.comms_dict == {}
    exchange(torch.zeros(4), prof=True, log_name="mine")
    assert list(comms_logger.comms_dict) == ["mine"]


def test_arguments_come_after_the_config():
    dist.configure({"comms_logger": {"enabled": True}}, enabled=False)
    assert not comms_logger.enabled


def test_summary_of_nothing_says_so(caplog):
    assert dist.log_summary().splitlines()[1:] == []


class Backend:
    """Whose collectives are over at once."""

    name, group, rank, world_size = "none", None, 0, 2
    connect = allocate = release = None

    def all_reduce(self, full_N, *, tag=None):
        return DONE

    def abandon(self, works, *, failed):
        self.abandoned = works


def test_what_is_abandoned_is_what_the_backend_gave_also_inside_other_works():
    dist.configure(enabled=True)
    backend = Backend()
    group = RecordedGroup(backend)
    work = group.all_reduce(torch.zeros(4))
    assert work is not DONE
    group.abandon([work, Followed(work, lambda: None, in_poll=False)], failed=False)
    assert backend.abandoned == [DONE, DONE]
