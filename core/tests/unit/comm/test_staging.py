"""The pool of staging memory: reuse, the limit, and release."""

import torch
from deepspeed.comm.transports import StagingPool

CPU = torch.device("cpu")


def test_a_buffer_that_came_back_is_used_again_for_any_dtype():
    pool = StagingPool(1 << 20)
    first, view = pool.take(1000, torch.float32, CPU)
    assert view.shape == (1000,)
    assert view.dtype == torch.float32
    pool.give_back(first)
    second, view = pool.take(1900, torch.bfloat16, CPU)
    assert second is first
    assert view.dtype == torch.bfloat16


def test_buffers_out_at_the_same_time_are_apart():
    pool = StagingPool(1 << 20)
    first, one = pool.take(10, torch.float32, CPU)
    second, two = pool.take(10, torch.float32, CPU)
    one.fill_(1)
    two.fill_(2)
    assert (one == 1).all()
    assert first is not second


def test_the_limit_holds_over_many_sizes():
    pool = StagingPool(64 << 10)
    for kib in (1, 30, 7, 60, 64, 2, 33, 12) * 4:
        buffer, _ = pool.take(kib << 10, torch.uint8, CPU)
        assert pool.held_bytes <= 64 << 10
        pool.give_back(buffer)
    assert 0 < pool.held_bytes <= 64 << 10


def test_one_larger_than_the_limit_is_given_but_not_kept():
    pool = StagingPool(4096)
    buffer, _ = pool.take(1 << 20, torch.uint8, CPU)
    pool.give_back(buffer)
    assert pool.held_bytes == 0


def test_nothing_asked_for_holds_nothing():
    pool = StagingPool(4096)
    buffer, view = pool.take(0, torch.float32, CPU)
    assert buffer is None
    assert view.numel() == 0
    pool.give_back(buffer)
    assert pool.held_bytes == 0


def test_release_drops_what_is_free():
    pool = StagingPool(1 << 20)
    buffer, _ = pool.take(1000, torch.float32, CPU)
    pool.give_back(buffer)
    pool.release()
    assert pool.held_bytes == 0
