"""The way of a bucket: its states, a second reduction in a step, what is kept of it, and where its memory goes."""

import itertools

import pytest
import torch
from deepspeed.zero import bucket as bucket_module
from deepspeed.zero.bucket import LEGAL_MOVES, Bucket, BucketPool, BucketState
from deepspeed.zero.layout import UnitLayout

EMPTY, FILLING, REDUCING, REDUCED = BucketState


class Peers:
    """The other ranks: what they contribute is added when the wait comes."""

    def __init__(self, others=0.0):
        self.others, self.sent, self.waits = others, [], 0
        self.is_done = False

    def __call__(self, wire):
        self.sent.append((wire.dtype, wire.clone(), wire.data_ptr()))
        peers = self

        class Sum:
            has_waited = False

            def poll(self):
                return peers.is_done

            def wait(self):
                if not self.has_waited:
                    self.has_waited = True
                    peers.waits += 1
                    wire.add_(peers.others)

        return Sum()


class Recorded:
    """Work that writes down when it is waited for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(self.name)


class Keeper:
    def __init__(self, log):
        self.log, self.kept = log, []

    def __call__(self, index, work, summed):
        self.log.append("keep")
        work.wait()
        self.kept.append((index, summed.clone()))
        return Recorded(self.log, "copied")


class Allocator:
    def __init__(self):
        self.sizes = []

    def __call__(self, numel):
        self.sizes.append(numel)
        return torch.full((numel,), 7.0)


def make_bucket(*numels, kept=None, world_size=1, rank=0, pool=None, wire_dtype=None, keep=None, shapes=None):
    """A bucket of a unit, and its buffer; with several ranks it is that of stage 1."""
    layout = UnitLayout.single(numels) if world_size == 1 else UnitLayout.even(numels, world_size)
    home = torch.full((layout.padded_numel,), 7.0)  # what was there before must not matter
    shard = layout.shard(rank)
    memory = (lambda: home) if pool is None else None
    kept = shard if kept is None else kept
    shapes = shapes or [(numel,) for numel in numels]
    bucket = Bucket(
        3, layout, shapes=shapes, memory=memory, pool=pool, result=shard, kept=kept, wire_dtype=wire_dtype, keep=keep
    )
    return bucket, home


def fill(bucket, *values):
    bucket.begin_backward()
    for param, value in enumerate(values):
        if value is not None:
            bucket.write({param: torch.full((bucket.layout.numels[param],), float(value))})


def test_the_moves_in_order():
    bucket, home = make_bucket(2, 1)
    peers = Peers(others=10.0)
    assert bucket.state is EMPTY
    fill(bucket, 1, 2)
    assert (bucket.state, bucket.num_missing) == (FILLING, 0)
    bucket.launch(peers)
    assert bucket.state is REDUCING
    assert peers.waits == 0, "launch must not wait"
    bucket.finish()
    bucket.finish()
    assert (bucket.state, peers.waits) == (REDUCED, 1)
    assert home.tolist() == [11.0, 11.0, 12.0]
    bucket.clear()
    assert bucket.state is EMPTY


#: what is called to get from a state to another one
DEEDS = {
    FILLING: lambda bucket: bucket.write({0: torch.ones(2)}),
    REDUCING: lambda bucket: bucket.launch(Peers()),
    REDUCED: lambda bucket: bucket.finish(),
    EMPTY: lambda bucket: bucket.abandon(),
}
WAYS = {EMPTY: [], FILLING: [FILLING], REDUCING: [REDUCING], REDUCED: [REDUCING, REDUCED]}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(BucketState, repeat=2)))
def test_every_legal_move_is_made_and_no_other(source, target, pooled):
    bucket, _ = make_bucket(2, pool=BucketPool(1, Allocator()) if pooled else None)
    for state in WAYS[source]:
        DEEDS[state](bucket)
    assert bucket.state is source
    if (source, target) in LEGAL_MOVES:
        DEEDS[target](bucket)
        assert bucket.state is target
    elif target is REDUCED or (source, target) == (FILLING, FILLING):  # nothing in flight; one more gradient
        DEEDS[target](bucket)
        assert bucket.state is source
    elif (source, target) == (REDUCING, FILLING):  # by way of REDUCED: the gradient is late
        DEEDS[target](bucket)
        assert (bucket.state, bucket.is_late) == (REDUCING, True)
        bucket.finish()
        assert bucket.state is FILLING
    else:
        with pytest.raises(AssertionError):
            DEEDS[target](bucket)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_multiplied_cast_and_added(dtype):
    grad = torch.arange(6, dtype=dtype).view(2, 3).t().contiguous().t()  # not contiguous
    bucket, home = make_bucket(1, 6, shapes=[(), (2, 3)])
    bucket.begin_backward(0.5)
    bucket.write({1: grad})
    bucket.flush()
    assert home[1:].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    bucket.write({1: grad})
    bucket.write({0: torch.tensor(4.0, dtype=dtype)})
    bucket.flush()
    assert home.tolist() == [2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_is_not_rounded_to_the_gradients_dtype(dtype):
    grads = [torch.linspace(-2, 2, numel).to(dtype) for numel in (300, 40)]
    home = torch.empty(340, dtype=dtype)
    layout, shapes = UnitLayout.single([300, 40]), [(300,), (40,)]
    bucket = Bucket(0, layout, shapes=shapes, memory=lambda: home, result=(0, 340), kept=(0, 340), wire_dtype=None)
    bucket.begin_backward(1 / 3)
    for param, grad in enumerate(grads):
        bucket.write({param: grad})
    assert torch.equal(home, torch.cat(grads) * (1 / 3))


def test_small_gradients_wait_for_each_other():
    bucket, home = make_bucket(1, 1, 1)
    fill(bucket, 1, 2)
    assert home.tolist() == [7.0] * 3, "not worth an operation yet"
    bucket.write({0: torch.ones(1)})
    assert home.tolist() == [2.0, 2.0, 7.0], "a second gradient of a parameter is added to the first"
    bucket.write({2: torch.full((1,), 3.0)})
    assert home.tolist() == [2.0, 2.0, 3.0], "the bucket is full"


def test_a_large_gradient_waits_for_none():
    bucket, home = make_bucket(bucket_module.FLUSH_NUMEL, 1)
    bucket.begin_backward(0.5)
    bucket.write({0: torch.ones(bucket_module.FLUSH_NUMEL)})
    assert home.sum() == bucket_module.FLUSH_NUMEL / 2 + 7.0


def test_gradients_that_wait_are_dropped_with_the_others():
    bucket, home = make_bucket(1, 1)
    fill(bucket, 1)
    bucket.abandon()
    fill(bucket, None, 2)
    bucket.launch(Peers())
    assert home.tolist() == [0.0, 2.0]


def test_num_missing_counts_each_parameter_once():
    bucket, _ = make_bucket(1, 1)
    fill(bucket, 1, None)
    assert bucket.num_missing == 1
    bucket.write({0: torch.ones(1)})
    assert bucket.num_missing == 1
    bucket.write({1: torch.ones(1)})
    assert bucket.num_missing == 0


@pytest.mark.parametrize("layout", [UnitLayout.even([2, 1], 2), UnitLayout.whole([2, 1], 2)])
def test_what_has_no_gradient_and_what_no_parameter_covers_contributes_zero(layout):
    home = torch.full((layout.padded_numel,), 7.0)
    bucket = Bucket(0, layout, shapes=[(2,), (1,)], memory=lambda: home, result=(0, 2), kept=(0, 2), wire_dtype=None)
    peers = Peers()
    fill(bucket, None, 3)
    bucket.launch(peers)
    assert peers.sent[0][1].tolist() == [0.0, 0.0, 3.0, 0.0]


def test_a_bucket_without_any_gradient_is_launched_as_zeros():
    bucket, home = make_bucket(2, 1)
    bucket.begin_backward()
    bucket.launch(Peers(others=4.0))
    bucket.finish()
    assert home.tolist() == [4.0] * 3


def test_without_a_launch_backwards_add_up():
    bucket, home = make_bucket(1)
    fill(bucket, 1)
    fill(bucket, 2)
    assert home.tolist() == [3.0]


def test_a_forgotten_gradient_is_overwritten():
    bucket, home = make_bucket(1, 1)
    fill(bucket, 1, 1)
    bucket.forget(0)
    fill(bucket, 5, 5)
    assert home.tolist() == [5.0, 6.0]


# ---- a second reduction in a step ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "second"), [((0, 4), [13.0, 13.0, 10.0, 10.0]), ((0, 0), [2.0, 2.0, 0.0, 0.0]), ((1, 3), [2, 13, 10, 0])]
)
def test_only_the_kept_range_of_a_sum_is_contributed_again(kept, second):
    bucket, _ = make_bucket(2, 2, kept=kept)
    peers = Peers(others=10.0)
    fill(bucket, 1, None)
    bucket.launch(peers)
    fill(bucket, 2, None)  # begin_backward finishes what is in flight
    bucket.launch(peers)
    assert [wire.tolist() for _, wire, _ in peers.sent] == [[1.0, 1.0, 0.0, 0.0], second]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_shard_of_a_second_reduction_comes_from_its_owner(rank):
    bucket, _ = make_bucket(2, 1, world_size=2, rank=rank)  # shards [0, 2) and [2, 4), one element of padding
    peers = Peers(others=10.0)
    for value in (1, 2):
        fill(bucket, value, value)
        bucket.launch(peers)
    assert peers.sent[1][1].tolist() == ([13.0, 13.0, 2.0, 0.0] if rank == 0 else [2.0, 2.0, 13.0, 0.0])


def test_a_rank_without_new_gradients_joins_a_second_reduction():
    bucket, home = make_bucket(2, kept=(0, 1))
    peers = Peers(others=10.0)
    fill(bucket, 1)
    bucket.launch(peers)
    bucket.finish()
    bucket.launch(peers)  # a gradient was late on another rank
    bucket.finish()
    assert peers.sent[1][1].tolist() == [11.0, 0.0]
    assert home.tolist() == [21.0, 10.0]


@pytest.mark.parametrize(("kept", "second"), [((0, 2), [16.0, 12.0]), ((0, 0), [5.0, 0.0])])
@pytest.mark.parametrize("reduction", ["in flight", "done", "finished"])
def test_a_late_gradient_is_reduced_a_second_time(kept, second, reduction):
    bucket, _ = make_bucket(1, 1, kept=kept)
    peers = Peers(others=10.0)
    fill(bucket, 1, 2)
    bucket.launch(peers)
    peers.is_done = reduction == "done"
    if reduction == "finished":  # early, while the backward goes on
        bucket.finish()
    assert not bucket.is_late
    bucket.write({0: torch.tensor([5.0])})
    assert bucket.is_late
    if reduction == "in flight":
        assert peers.waits == 0, "a hook waits for nobody"
        bucket.finish()
    assert (bucket.state, peers.waits) == (FILLING, 1)
    bucket.launch(peers)
    bucket.finish()
    assert peers.sent[1][1].tolist() == second


def test_late_gradients_before_and_after_the_end_of_the_reduction():
    bucket, home = make_bucket(1)
    peers = Peers(others=10.0)
    fill(bucket, 1)
    bucket.launch(peers)
    for peers.is_done in (False, True, True):
        bucket.write({0: torch.tensor([2.0])})
    bucket.flush()
    assert (bucket.state, home.tolist()) == (FILLING, [17.0])


def test_a_late_gradient_has_the_factor_of_its_backward():
    bucket, home = make_bucket(1)
    bucket.begin_backward(0.5)
    bucket.write({0: torch.tensor([2.0])})
    bucket.launch(Peers())
    bucket.write({0: torch.tensor([4.0])})
    bucket.begin_backward(10.0)
    bucket.flush()
    assert home.tolist() == [3.0]


def test_a_gradient_of_the_next_backward_is_not_late():
    bucket, _ = make_bucket(1)
    fill(bucket, 1)
    bucket.launch(Peers())
    fill(bucket, 1)
    assert (bucket.is_late, bucket.num_missing) == (False, 0)


# ---- the end of a step ----------------------------------------------------------------------------------------------


def test_clear_forgets_and_waits_for_what_is_in_flight():
    bucket, home = make_bucket(1)
    peers = Peers()
    fill(bucket, 1)
    bucket.launch(peers)
    bucket.write({0: torch.ones(1)})
    bucket.finish()
    bucket.launch(peers)
    bucket.write({0: torch.ones(1)})
    bucket.clear()
    assert (bucket.state, bucket.is_late, peers.waits) == (EMPTY, False, 2)
    fill(bucket, 4)
    assert home.tolist() == [4.0]


@pytest.mark.parametrize("pooled", [False, True])
def test_abandon_waits_for_nothing_and_gives_the_work(pooled):
    bucket, _ = make_bucket(1, pool=BucketPool(1, Allocator()) if pooled else None, keep=Keeper([]))
    peers = Peers()
    fill(bucket, 1)
    assert bucket.abandon() is None, "nothing is in flight"
    fill(bucket, 1)
    bucket.launch(peers)
    work = bucket.abandon()
    assert (bucket.state, peers.waits) == (EMPTY, 0)
    work.wait()
    assert peers.waits == 1
    fill(bucket, 4)
    bucket.launch(peers)
    assert peers.sent[1][1].tolist() == [4.0]


def test_poll_says_whether_finish_would_block():
    bucket, _ = make_bucket(1)
    assert bucket.poll()
    peers = Peers()
    fill(bucket, 1)
    bucket.launch(peers)
    assert not bucket.poll()
    peers.is_done = True
    assert bucket.poll()
    bucket.finish()
    assert bucket.poll()


def test_memory_is_made_at_the_first_write_and_dropped_by_release():
    made = []
    layout = UnitLayout.single([2])
    bucket = Bucket(
        0,
        layout,
        shapes=[(2,)],
        memory=lambda: made.append(torch.zeros(2)) or made[-1],
        result=(0, 2),
        kept=(0, 2),
        wire_dtype=None,
    )
    bucket.begin_backward()
    assert not made
    for _ in range(2):
        fill(bucket, 1)
    assert len(made) == 1
    bucket.release()
    fill(bucket, 1)
    assert len(made) == 2


# ---- the wire's dtype -----------------------------------------------------------------------------------------------


def test_the_wire_has_its_own_dtype_and_the_sum_comes_back():
    bucket, home = make_bucket(2, wire_dtype=torch.bfloat16)
    peers = Peers(others=1.0)
    fill(bucket, 2)
    bucket.launch(peers)
    bucket.finish()
    assert peers.sent[0][0] is torch.bfloat16
    assert (home.dtype, home.tolist()) == (torch.float32, [3.0, 3.0])


def test_the_buffers_own_dtype_is_sent_without_a_copy():
    bucket, home = make_bucket(2, wire_dtype=torch.float32)
    peers = Peers()
    fill(bucket, 2)
    bucket.launch(peers)
    assert peers.sent[0][2] == home.data_ptr()


def test_a_sum_of_another_wire_dtype_is_kept_in_the_buffers_own():
    keeper = Keeper([])
    bucket, home = make_bucket(2, wire_dtype=torch.bfloat16, keep=keeper)
    fill(bucket, 1)
    bucket.launch(Peers(others=0.5))
    bucket.finish()
    assert home.tolist() == [1.5, 1.5]
    assert keeper.kept[0][1].dtype is torch.float32


# ---- where the sum goes ---------------------------------------------------------------------------------------------


def test_a_sum_that_is_kept_elsewhere_is_passed_with_its_work():
    log = []
    keeper = Keeper(log)
    bucket, home = make_bucket(2, 1, keep=keeper)
    fill(bucket, 1, 2)
    bucket.launch(lambda wire: Recorded(log, "reduced"))
    bucket.finish()
    assert log == ["keep", "reduced"]
    assert keeper.kept[0][0] == bucket.index == 3
    assert keeper.kept[0][1].tolist() == [1.0, 1.0, 2.0]
    bucket.write({0: torch.ones(2)})  # late
    assert log == ["keep", "reduced", "copied"], "the memory is written when its copy is done"
    assert home.tolist() == [2.0, 2.0, 2.0], "this rank goes on adding to it"
    bucket.write({1: torch.ones(1)})
    assert log.count("copied") == 1


@pytest.mark.parametrize(("rank", "mine"), [(0, [11.0, 11.0]), (1, [12.0, 10.0])])
def test_only_this_ranks_shard_is_kept(rank, mine):
    keeper = Keeper([])
    bucket, _ = make_bucket(2, 1, world_size=2, rank=rank, keep=keeper)
    fill(bucket, 1, 2)
    bucket.launch(Peers(others=10.0))
    bucket.finish()
    assert keeper.kept[0][1].tolist() == mine


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_a_reduced_bucket_gives_its_memory_back_and_the_next_takes_it():
    allocate = Allocator()
    pool = BucketPool(2, allocate)
    large, _ = make_bucket(4, pool=pool, keep=Keeper([]))
    small, _ = make_bucket(2, 1, pool=pool, keep=Keeper([]))
    peers = Peers()
    for bucket in (large, small):
        fill(bucket, 1, None)
        bucket.launch(peers)
        bucket.finish()
    assert allocate.sizes == [4]
    assert peers.sent[1][1].tolist() == [1.0, 1.0, 0.0], "the pool's old contents must not be sent"
    fill(large, 2)  # the whole buffer came back, not only the part that `small` used
    assert allocate.sizes == [4]


def test_a_borrowed_buffer_contributes_only_what_is_new():
    bucket, _ = make_bucket(1, 1, pool=BucketPool(2, Allocator()), keep=Keeper([]))
    peers = Peers(others=10.0)
    fill(bucket, 1, 2)
    bucket.launch(peers)
    bucket.write({0: torch.tensor([5.0])})  # late
    bucket.finish()
    bucket.launch(peers)
    bucket.finish()
    bucket.launch(peers)  # another rank's was late
    assert [wire.tolist() for _, wire, _ in peers.sent] == [[1.0, 2.0], [5.0, 0.0], [0.0, 0.0]]


def test_a_pool_keeps_a_limited_number_and_counts_it():
    allocate = Allocator()
    pool = BucketPool(1, allocate)
    first, second = pool.take(3), pool.take(3)
    pool.give(first)
    pool.give(second)
    assert pool.take(3).data_ptr() == first.data_ptr()
    pool.take(3)
    assert allocate.sizes == [3, 3, 3]
    assert pool.free_bytes == 0
    pool.give(first)
    assert pool.free_bytes == first.nbytes


def test_a_backends_own_memory_is_not_taken_for_one_large_buffer():
    arena, sizes = torch.zeros(100), []

    def allocate(numel):
        sizes.append(numel)
        return arena[10 * len(sizes) :][:numel]  # a part of a shared-memory segment, as a backend may give it

    pool = BucketPool(2, allocate)
    first = pool.take(2)
    pool.give(first)
    assert pool.take(3).data_ptr() == arena[20:].data_ptr()
    assert pool.take(1).data_ptr() == first.data_ptr()
    assert sizes == [2, 3]


def test_a_buffer_that_is_too_small_stays_in_the_pool():
    allocate = Allocator()
    pool = BucketPool(2, allocate)
    pool.give(pool.take(2))
    assert pool.take(5).numel() == 5
    assert allocate.sizes == [2, 5]


def test_a_bucket_that_was_never_launched_gives_its_buffer_back():
    allocate = Allocator()
    pool = BucketPool(2, allocate)
    bucket, _ = make_bucket(2, pool=pool)
    fill(bucket, 1)
    bucket.clear()
    assert pool.free_bytes == 8
    pool.take(2)
    assert allocate.sizes == [2]


def test_a_borrowed_buffer_is_lent_or_dropped_when_its_copy_is_done():
    log = []
    pool = BucketPool(1, Allocator())
    first, second = (make_bucket(3, pool=pool, keep=Keeper(log))[0] for _ in range(2))
    for bucket in (first, second):
        fill(bucket, 1)
        bucket.launch(lambda wire: Recorded(log, "reduced"))
    first.finish()
    assert log == ["keep", "reduced"]
    second.finish()  # no room for it: the allocator may give it to anyone
    assert log == ["keep", "reduced"] * 2 + ["copied"]
    pool.take(3)
    assert log[-2:] == ["copied", "copied"]
