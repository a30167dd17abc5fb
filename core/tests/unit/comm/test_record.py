"""The comms logger."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import comms_logger
from deepspeed.comm.record import recorded


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
    assert comms_logger.rows == {}


def test_counts_by_operation_and_size():
    dist.configure(enabled=True)
    for _ in range(3):
        exchange(torch.zeros(4))
    exchange(tensor=torch.zeros(8, dtype=torch.bfloat16))
    exchange(torch.zeros(1), [torch.zeros(4), torch.zeros(4)])
    rows = comms_logger.rows["exchange"]
    assert {size: row.count for size, row in rows.items()} == {16: 4, 32: 1}
    assert all(0 < row.max_s <= row.total_s for row in rows.values())
    table = dist.log_summary()
    assert "exchange" in table
    assert table.splitlines()[1].split()[1:3] == ["16", "4"]


def test_only_the_operations_asked_for():
    dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}})
    exchange(torch.zeros(4))
    assert comms_logger.rows == {}
    exchange(torch.zeros(4), prof=True, log_name="mine")
    assert list(comms_logger.rows) == ["mine"]


def test_arguments_come_after_the_config():
    dist.configure({"comms_logger": {"enabled": True}}, enabled=False)
    assert not comms_logger.enabled


def test_summary_of_nothing_says_so(caplog):
    assert dist.log_summary().splitlines()[1:] == []
