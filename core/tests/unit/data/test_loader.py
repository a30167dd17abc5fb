"""The loader that shares a dataset among ranks, and the one that never ends."""

import itertools

import pytest
import torch
from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.errors import ConfigError
from torch.utils.data import Dataset, IterableDataset, SequentialSampler


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def samples(loader):
    return [int(value) for batch in loader for value in batch]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_dataset(world_size):
    loaders = [DeepSpeedDataLoader(Numbers(16), 2, num_replicas=world_size, rank=rank) for rank in range(world_size)]
    seen = [samples(loader) for loader in loaders]
    assert sorted(itertools.chain(*seen)) == list(range(16))
    assert {len(share) for share in seen} == {16 // world_size}
    assert len(loaders[0]) == 16 // world_size // 2


def test_shuffled_alike_on_all_ranks_and_differently_in_each_epoch():
    loader = DeepSpeedDataLoader(Numbers(16), 4, num_replicas=1, rank=0)
    first = samples(loader)
    assert first != sorted(first)
    assert samples(loader) == first
    loader.set_epoch(1)
    assert samples(loader) != first


def test_in_order_on_request():
    loader = DeepSpeedDataLoader(Numbers(6), 2, num_replicas=2, rank=1, shuffle=False)
    assert samples(loader) == [1, 3, 5]
    loader.set_epoch(3)
    assert samples(loader) == [1, 3, 5]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 3]), (True, [4])])
def test_the_short_last_batch(drop_last, sizes):
    loader = DeepSpeedDataLoader(Numbers(7), 4, num_replicas=1, rank=0, drop_last=drop_last)
    assert [len(batch) for batch in loader] == sizes
    assert len(loader) == len(sizes)


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_that_do_not_divide_are_given_twice_and_never_dropped(drop_last):
    """11 samples, two ranks: 6 each, three whole batches of 2."""
    loaders = [
        DeepSpeedDataLoader(Numbers(11), 2, num_replicas=2, rank=rank, shuffle=False, drop_last=drop_last)
        for rank in range(2)
    ]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert [samples(loader) for loader in loaders] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]


def test_a_sampler_of_the_users_is_used_as_it_is():
    dataset = Numbers(4)
    loader = DeepSpeedDataLoader(dataset, 2, num_replicas=2, rank=1, data_sampler=SequentialSampler(dataset))
    assert samples(loader) == [0, 1, 2, 3]
    loader.set_epoch(1)  # it has none, and that is no error


def test_an_iterable_dataset_shards_itself():
    loader = DeepSpeedDataLoader(Stream(), 2, num_replicas=2, rank=1)
    assert samples(loader) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dataset", [(number for number in range(4)), {1, 2}])
def test_a_dataset_that_ranks_cannot_share(dataset):
    with pytest.raises(
        ConfigError, match=r"the dataset is (generator|set), which has no length or no samples by number"
    ):
        DeepSpeedDataLoader(dataset, 2, num_replicas=2, rank=0)


def test_a_job_resumes_with_other_ranks_where_it_was():
    """Two epochs of 24 samples, global batches of 12: each time with another number of ranks."""

    def batches(world_size, num_samples, count):
        loaders = [
            DeepSpeedDataLoader(Numbers(24), 2, num_replicas=world_size, rank=rank) for rank in range(world_size)
        ]
        for loader in loaders:
            loader.resume(num_samples)
        ranks = [RepeatingLoader(loader) for loader in loaders]
        steps = 12 // (2 * world_size)
        return [sorted(int(n) for rank in ranks for _ in range(steps) for n in next(rank)) for _ in range(count)]

    unbroken = batches(1, 0, 4)
    assert sorted(unbroken[0] + unbroken[1]) == sorted(unbroken[2] + unbroken[3]) == list(range(24))
    assert unbroken[0] != unbroken[2]
    assert batches(2, 0, 1) + batches(3, 12, 1) + batches(1, 24, 1) + batches(6, 36, 1) == unbroken
    assert batches(3, 12, 3) == unbroken[1:]


def test_a_resume_that_cannot_be_exact_is_refused():
    with pytest.raises(ConfigError, match="asked for 4 of 7 samples, which are not whole batches of 1 rank x 4"):
        DeepSpeedDataLoader(Numbers(7), 4, num_replicas=1, rank=0).resume(4)
    with pytest.raises(ConfigError, match="resume: an iterable dataset decides by itself"):
        DeepSpeedDataLoader(Stream(), 2, num_replicas=2, rank=1).resume(4)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (2, 2), (4, 3)])
def test_an_epoch_goes_on_in_its_middle_with_other_ranks(before, after, drop_last):
    """23 samples, of which no number of batches is all: none is lost before the end of the epoch, none comes twice."""

    def ranks(world_size, batch_size):
        return [
            DeepSpeedDataLoader(Numbers(23), batch_size, num_replicas=world_size, rank=rank, drop_last=drop_last)
            for rank in range(world_size)
        ]

    former = ranks(before, 2)
    for loader in former:
        loader.set_epoch(1)
    iterators = [iter(loader) for loader in former]
    seen = [int(sample) for _ in range(2) for batch in iterators for sample in next(batch)]
    (state,) = {tuple(loader.state_dict().items()) for loader in former}
    assert dict(state) == {"epoch": 1, "num_samples": 4 * before, "size": 23}
    later = ranks(after, 1)
    for loader in later:
        loader.load_state_dict(dict(state))
        loader.set_epoch(1)  # as a script's own loop does
    rest = [samples(loader) for loader in later]
    assert len({len(share) for share in rest}) == 1
    num_twice = -(23 - len(seen)) % after  # that ranks have as many, as torch does it
    assert sorted(seen + sum(rest, [])) == sorted([*range(23), *_first(num_twice)])
    assert later[0].state_dict()["num_samples"] == 23
    following = ranks(after, 1)[0]
    following.load_state_dict(later[0].state_dict())
    assert following.epoch == 2


def _first(count):
    """The first samples of epoch 1, which fill up its end."""
    loader = DeepSpeedDataLoader(Numbers(23), 1, num_replicas=1, rank=0)
    loader.set_epoch(1)
    return samples(loader)[:count]


def test_a_state_in_the_order_of_a_repeating_loader():
    def repeating():
        loader = DeepSpeedDataLoader(Numbers(6), 2, num_replicas=1, rank=0)
        return loader, RepeatingLoader(loader)

    loader, batches = repeating()
    unbroken = [next(batches).tolist() for _ in range(8)]
    loader, batches = repeating()
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    assert state == {"epoch": 1, "num_samples": 2, "size": 6}
    loader, batches = repeating()
    loader.load_state_dict(state)
    assert [next(batches).tolist() for _ in range(4)] == unbroken[4:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iteration_follows_a_state_loaded_within_it(num_workers):
    loader = DeepSpeedDataLoader(Numbers(12), 2, num_replicas=1, rank=0, num_workers=num_workers)
    batches = RepeatingLoader(loader)
    given = [next(batches).tolist() for _ in range(7)]
    state = loader.state_dict()
    given += [next(batches).tolist() for _ in range(13)]
    loader.load_state_dict(state)
    assert [next(batches).tolist() for _ in range(13)] == given[7:]


def test_the_epoch_after_one_that_was_gone_on_with_is_whole():
    """A repeating loader ends the epoch of a state before its first batch."""
    loader = DeepSpeedDataLoader(Numbers(6), 2, num_replicas=1, rank=0, drop_last=True)
    batches = RepeatingLoader(loader)
    for _ in range(3):
        next(batches)
    loader.load_state_dict({"epoch": 2, "num_samples": 5, "size": 6})  # one is left: no batch
    assert sorted(int(sample) for _ in range(3) for sample in next(batches)) == list(range(6))
    assert loader.state_dict() == {"epoch": 3, "num_samples": 6, "size": 6}


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_without_its_short_batch_is_over(world_size):
    loader = DeepSpeedDataLoader(Numbers(21), 4, num_replicas=world_size, rank=0, drop_last=True)
    assert len(samples(loader)) == (20 if world_size == 1 else 8)
    state = loader.state_dict()
    assert state == {"epoch": 0, "num_samples": 21, "size": 21}
    loader.load_state_dict(state)
    assert loader.epoch == 1


def test_a_sampler_of_the_users_has_no_place():
    dataset = Numbers(4)
    loader = DeepSpeedDataLoader(dataset, 2, num_replicas=2, rank=1, data_sampler=SequentialSampler(dataset))
    message = "found a SequentialSampler of the script's, which decides by itself which sample is next"
    with pytest.raises(ConfigError, match=f"state_dict: {message}"):
        loader.state_dict()
    with pytest.raises(ConfigError, match=f"load_state_dict: {message}"):
        loader.load_state_dict({"epoch": 0, "num_samples": 2, "size": 4})
    with pytest.raises(ConfigError, match=f"resume: {message}"):
        loader.resume(4)


def test_a_state_of_another_dataset_is_refused():
    loader = DeepSpeedDataLoader(Numbers(6), 2, num_replicas=1, rank=0)
    with pytest.raises(ConfigError, match="found the state of a dataset of 7 samples, this one has 6"):
        loader.load_state_dict({"epoch": 0, "num_samples": 2, "size": 7})
    with pytest.raises(ConfigError, match="state_dict: an iterable dataset decides by itself"):
        DeepSpeedDataLoader(Stream(), 2, num_replicas=2, rank=1).state_dict()


def test_collate():
    loader = DeepSpeedDataLoader(Numbers(2), 2, num_replicas=1, rank=0, shuffle=False, collate_fn=tuple)
    assert list(loader) == [(0, 1)]


def test_repeating_starts_again():
    loader = RepeatingLoader([1, 2, 3])
    assert iter(loader) is loader
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_repeating_shuffles_each_epoch_anew():
    loader = DeepSpeedDataLoader(Numbers(16), 16, num_replicas=1, rank=0)
    repeating = RepeatingLoader(loader)
    first, second = next(repeating), next(repeating)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(16))
    assert not torch.equal(first, second)


def test_repeating_what_is_over_is_an_error():
    batches = RepeatingLoader(iter([1, 2]))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match="gives no more batches when it is started again; give one that does"):
        next(batches)


def test_repeating_nothing_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="found a loader without a single batch"):
        next(RepeatingLoader([]))
