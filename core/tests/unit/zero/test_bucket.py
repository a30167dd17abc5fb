"""The way of a bucket: FILLING -> REDUCING -> FILLING, its second round, what its holder keeps, where memory goes."""

import pytest
import torch
from deepspeed.zero.bucket import Bucket, BucketPool, BucketState
from deepspeed.zero.layout import GroupLayout, cut_buckets


class Exchange:
    """Stands for the other ranks: adds what they contribute when the wait comes."""

    def __init__(self, others=0.0):
        self.others, self.sent, self.waits = others, [], 0

    def __call__(self, wire):
        self.sent.append((wire.dtype, wire.clone()))
        exchange = self

        class Sum:
            def wait(self):
                exchange.waits += 1
                wire.add_(exchange.others)

        return Sum()


def spec_of(*numels):
    (spec,) = cut_buckets([GroupLayout(numels, (0, sum(numels)))], [list(range(len(numels)))], 1000)
    return spec


def make_bucket(*numels, is_holder=True, pool=None, wire_dtype=None, dtype=torch.float32):
    spec = spec_of(*numels)
    home = torch.full((spec.numel,), 7.0, dtype=dtype)  # what was there before must not matter
    take = (lambda _: home) if pool is None else pool.take
    give = None if pool is None else pool.give
    return Bucket(spec, is_holder=is_holder, take=take, give=give, wire_dtype=wire_dtype), home


def fill(bucket, *values):
    bucket.begin_backward()
    for slot, value in zip(bucket.slots, values):
        if value is not None:
            bucket.write(slot, torch.full((slot.fragment.numel,), float(value)), 1.0)


def test_the_moves_in_order():
    bucket, home = make_bucket(2, 1)
    exchange = Exchange(others=10.0)
    fill(bucket, 1, 2)
    assert (bucket.state, bucket.num_missing) == (BucketState.FILLING, 0)
    bucket.launch(exchange)
    assert bucket.state is BucketState.REDUCING
    assert exchange.waits == 0, "launch must not wait"
    bucket.finish()
    bucket.finish()
    assert (bucket.state, exchange.waits) == (BucketState.FILLING, 1)
    assert home.tolist() == [11.0, 11.0, 12.0]


def test_a_launch_while_reducing_is_refused():
    bucket, _ = make_bucket(1)
    fill(bucket, 1)
    bucket.launch(Exchange())
    with pytest.raises(AssertionError):
        bucket.launch(Exchange())


def test_a_write_multiplies_takes_its_slice_and_casts():
    layout = GroupLayout([6], (0, 4, 8))
    left, right = cut_buckets([layout], [[0]], 1000)[::-1]
    grad = torch.arange(6, dtype=torch.float64).view(2, 3).t().contiguous().t()  # not contiguous
    home = torch.empty(2, dtype=torch.float32)
    last = right if right.start == 4 else left
    bucket = Bucket(last, is_holder=True, take=lambda _: home, give=None, wire_dtype=None)
    bucket.write(bucket.slots[0], grad, 0.5)
    assert home.tolist() == [2.0, 2.5]
    bucket.write(bucket.slots[0], grad, 0.5)
    assert home.tolist() == [4.0, 5.0]


def test_num_missing_counts_each_fragment_once():
    bucket, _ = make_bucket(1, 1)
    fill(bucket, 1, None)
    assert bucket.num_missing == 1
    bucket.write(bucket.slots[0], torch.ones(1), 1.0)
    assert bucket.num_missing == 1
    bucket.write(bucket.slots[1], torch.ones(1), 1.0)
    assert bucket.num_missing == 0


def test_a_fragment_without_gradient_contributes_zero():
    bucket, home = make_bucket(2, 1)
    exchange = Exchange()
    fill(bucket, None, 3)
    bucket.launch(exchange)
    bucket.finish()
    assert home.tolist() == [0.0, 0.0, 3.0]


def test_without_a_launch_backwards_add_up():
    bucket, home = make_bucket(1, is_holder=False)
    fill(bucket, 1)
    fill(bucket, 2)
    assert home.tolist() == [3.0]


@pytest.mark.parametrize(("is_holder", "second"), [(True, 11.0 + 2.0), (False, 2.0)])
def test_after_a_reduction_only_the_holder_contributes_the_sum(is_holder, second):
    bucket, _ = make_bucket(1, is_holder=is_holder)
    exchange = Exchange(others=10.0)
    fill(bucket, 1)
    bucket.launch(exchange)
    fill(bucket, 2)  # begin_backward finishes what is under way
    bucket.launch(exchange)
    bucket.finish()
    assert [wire.item() for _, wire in exchange.sent] == [1.0, second]


@pytest.mark.parametrize(("is_holder", "second"), [(True, [11.0 + 5.0, 12.0]), (False, [5.0, 0.0])])
def test_a_late_gradient_goes_in_a_second_round(is_holder, second):
    bucket, _ = make_bucket(1, 1, is_holder=is_holder)
    exchange = Exchange(others=10.0)
    fill(bucket, 1, 2)
    bucket.launch(exchange)
    assert not bucket.is_late
    bucket.write(bucket.slots[0], torch.tensor([5.0]), 1.0)
    assert bucket.is_late
    assert (bucket.state, exchange.waits) == (BucketState.FILLING, 1)
    bucket.launch(exchange)
    bucket.finish()
    assert exchange.sent[1][1].tolist() == second


def test_clear_forgets():
    bucket, home = make_bucket(1)
    fill(bucket, 1)
    bucket.launch(Exchange())
    bucket.write(bucket.slots[0], torch.ones(1), 1.0)
    bucket.clear()
    assert (bucket.state, bucket.is_late) == (BucketState.FILLING, False)
    fill(bucket, 4)
    assert home.tolist() == [4.0]


def test_the_wire_has_its_own_dtype_and_the_sum_comes_back():
    bucket, home = make_bucket(2, wire_dtype=torch.bfloat16)
    exchange = Exchange(others=1.0)
    fill(bucket, 2)
    bucket.launch(exchange)
    bucket.finish()
    assert exchange.sent[0][0] is torch.bfloat16
    assert (home.dtype, home.tolist()) == (torch.float32, [3.0, 3.0])


def test_the_memorys_own_dtype_is_sent_without_a_copy():
    bucket, home = make_bucket(2, wire_dtype=torch.float32)
    fill(bucket, 2)
    wires = []

    def exchange(wire):
        wires.append(wire)
        return Exchange()(wire)

    bucket.launch(exchange)
    assert wires[0].data_ptr() == home.data_ptr()


# ---- the pool ---------------------------------------------------------------------------------------------------


class Allocator:
    def __init__(self):
        self.sizes = []

    def __call__(self, numel):
        self.sizes.append(numel)
        return torch.full((numel,), 7.0)


def test_a_sent_bucket_gives_its_memory_back_and_the_next_takes_it():
    allocate = Allocator()
    pool = BucketPool(2, allocate)
    large, _ = make_bucket(4, is_holder=False, pool=pool)
    small, _ = make_bucket(2, 1, is_holder=False, pool=pool)
    exchange = Exchange()
    for bucket in (large, small):
        fill(bucket, 1, None)
        bucket.launch(exchange)
        bucket.finish()
    assert allocate.sizes == [4]
    assert exchange.sent[1][1].tolist() == [1.0, 1.0, 0.0], "the pool's old contents must not be sent"
    fill(large, 2)  # the whole buffer came back, not only the part that `small` used
    assert allocate.sizes == [4]


def test_a_pool_keeps_a_limited_number_and_counts_it():
    allocate = Allocator()
    pool = BucketPool(1, allocate)
    spec = spec_of(3)
    first, second = pool.take(spec), pool.take(spec)
    pool.give(first)
    pool.give(second)
    assert pool.take(spec).data_ptr() == first.data_ptr()
    pool.take(spec)
    assert allocate.sizes == [3, 3, 3]
    assert pool.free_bytes == 0
    pool.give(first)
    assert pool.free_bytes == first.nbytes


def test_a_backends_own_memory_is_not_taken_for_one_large_buffer():
    arena, sizes = torch.zeros(100), []

    def allocate(numel):
        sizes.append(numel)
        return arena[10 * len(sizes) :][:numel]  # a part of a shared-memory segment, as a backend may hand it out

    pool = BucketPool(2, allocate)
    first = pool.take(spec_of(2))
    pool.give(first)
    assert pool.take(spec_of(3)).data_ptr() == arena[20:].data_ptr()
    assert pool.take(spec_of(1)).data_ptr() == first.data_ptr()
    assert sizes == [2, 3]


def test_a_buffer_that_is_too_small_stays_in_the_pool():
    allocate = Allocator()
    pool = BucketPool(2, allocate)
    pool.give(pool.take(spec_of(2)))
    assert pool.take(spec_of(5)).numel() == 5
    assert allocate.sizes == [2, 5]


def test_an_unsent_bucket_of_the_pool_is_cleared():
    allocate = Allocator()
    pool = BucketPool(2, allocate)
    bucket, _ = make_bucket(2, is_holder=False, pool=pool)
    fill(bucket, 1)
    bucket.clear()
    assert bucket.slots[0].view is None
    pool.take(spec_of(2))
    assert allocate.sizes == [2]


class Recorded:
    """Work that writes down when it is waited for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(self.name)


class Keeper:
    def __init__(self, log):
        self.log, self.kept = log, []

    def __call__(self, spec, work, summed):
        self.log.append("keep")
        work.wait()
        self.kept.append((spec, summed.clone()))
        return Recorded(self.log, "copied")


def test_a_sum_that_is_kept_elsewhere_is_handed_over_with_its_exchange():
    log = []
    bucket, home = make_bucket(2, 1)
    bucket._keep = keeper = Keeper(log)
    fill(bucket, 1, 2)
    bucket.launch(lambda wire: Recorded(log, "exchanged"))
    bucket.finish()
    assert log == ["keep", "exchanged"]
    assert keeper.kept[0][0] == bucket.spec
    assert keeper.kept[0][1].tolist() == [1.0, 1.0, 2.0]
    bucket.write(bucket.slots[0], torch.ones(2), 1.0)  # late
    assert log == ["keep", "exchanged", "copied"], "the memory is written when its copy is done"
    assert home.tolist() == [2.0, 2.0, 2.0], "this rank goes on adding to it"
    bucket.write(bucket.slots[1], torch.ones(1), 1.0)
    assert log.count("copied") == 1


def test_what_is_kept_of_another_wire_dtype_is_in_the_memorys_own():
    bucket, home = make_bucket(2, wire_dtype=torch.bfloat16)
    bucket._keep = keeper = Keeper([])
    fill(bucket, 1)
    bucket.launch(Exchange(others=0.5))
    bucket.finish()
    assert home.tolist() == [1.5, 1.5]
    assert keeper.kept[0][1].dtype is torch.float32


def test_memory_of_the_pool_is_lent_or_dropped_when_its_copy_is_done():
    log = []
    pool = BucketPool(1, Allocator())
    first, _ = make_bucket(3, is_holder=False, pool=pool)
    second, _ = make_bucket(3, is_holder=False, pool=pool)
    for bucket in (first, second):
        bucket._keep = Keeper(log)
        fill(bucket, 1)
        bucket.launch(lambda wire: Recorded(log, "exchanged"))
    first.finish()
    assert log == ["keep", "exchanged"]
    second.finish()  # no room for it: the allocator may give it to anyone
    assert log == ["keep", "exchanged"] * 2 + ["copied"]
    pool.take(spec_of(3))
    assert log[-2:] == ["copied", "copied"]
