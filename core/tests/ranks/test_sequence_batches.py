"""A loader's batches over the ranks of a sequence, and the mean loss of its parts."""

import os

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.torch_group import forget
from deepspeed.sequence.batches import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.hugging_face import sequence_parallel_unit
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.testing.distributed import run_ranks


def adapter(batches, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    return UlyssesSPDataLoaderAdapter(batches, rank, dist.get_world_group(), size, "cpu", **options)


def made(rank, step, length):
    """A batch that says where it comes from."""
    tokens = torch.arange(length).expand(2, -1) + 100 * rank + 10 * step
    mask = torch.ones(2, length, dtype=torch.bool)
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": mask,
        "scale": torch.tensor(0.5 * rank),
        "step": step,
    }


def batches_job():
    """Rank r loads r + 1 batches, of other lengths."""
    rank = dist.get_rank()
    loader = [made(rank, step, 6 + 2 * rank) for step in range(rank + 1)]
    adapted = adapter(loader)
    assert len(adapted) == len(loader) * dist.get_world_size()
    return [
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
        for each in adapted
    ]


def test_all_ranks_train_on_each_batch_each_on_its_part():
    first, second = run_ranks(2, batches_job)
    assert [each["step"] for each in first] == [0, 0, 1]  # rank 0's, rank 1's, and the one that rank 1 has more
    assert [each["scale"] for each in first] == [0.0, 0.5, 0.5]
    for of_first, of_second, (rank, step) in zip(first, second, [(0, 0), (1, 0), (1, 1)], strict=True):
        length = 6 + 2 * rank
        tokens = [100 * rank + 10 * step + place for place in range(length)]
        shifted = [*tokens[1:], -100]
        half = length // 2
        assert of_first["input_ids"] == [tokens[:half]] * 2
        assert of_second["input_ids"] == [tokens[half:]] * 2
        assert of_first["shift_labels"] + of_second["shift_labels"] == [shifted[:half]] * 2 + [shifted[half:]] * 2
        assert of_second["position_ids"] == [list(range(half, length))] * 2
        assert of_second["attention_mask"] == [[True] * half] * 2


def wrong_batch_job():
    loader = [made(0, 0, 6 + dist.get_rank())]
    with pytest.raises((ValueError, PeerFailed)) as caught:
        list(adapter(loader, pad_to_sp_multiple=False))
    with pytest.raises(ValueError) as numbers:
        UlyssesSPDataLoaderAdapter(loader, 0, dist.get_world_group(), 3, "cpu")
    return str(caught.value), str(numbers.value)


def test_a_wrong_batch_of_one_rank_is_refused_on_all():
    for batch, numbers in run_ranks(2, wrong_batch_job):
        assert "a batch of rank 1 of the sequence-parallel group: sequences of 7 tokens" in batch
        assert "sp_world_size 3" in numbers


class Loader:
    """Fails on one rank: as it begins, at its second batch, or with a batch that cannot be told to others."""

    def __init__(self, fails, error):
        self.fails, self.error = fails, error

    def __iter__(self):
        if self.fails == "begin":
            raise self.error
        return self.batches()

    def batches(self):
        yield made(0, 0, 6)
        if self.fails == "second":
            raise self.error
        yield made(0, 1, 6) | ({"what": object()} if self.fails == "told" else {})


def failing_loader_job(path, fails, error):
    os.environ["DS_COMM_DIRECT"] = "1" if path == "direct" else "0"  # put back after the job
    forget()
    found = []
    try:
        for each in adapter(Loader(fails if dist.get_rank() == 1 else "", error)):
            found.append(each["step"])  # noqa: PERF401 - those before the failure
    except BaseException as caught:  # noqa: BLE001 - KeyboardInterrupt, too
        found.append(f"{type(caught).__name__}: {caught}")
    return found, [each["step"] for each in adapter(Loader("", None))]


@pytest.mark.parametrize(
    ("fails", "error", "reason"),
    [
        ("begin", OSError("the disk is gone"), "OSError: the disk is gone"),
        ("second", KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
        ("told", None, "ValueError: a batch of rank 1 of the sequence-parallel group: Object of type object is not"),
    ],
)
def test_a_loader_that_fails_on_one_rank_fails_on_all(path, fails, error, reason):
    (peer, goes_on), (failed, too) = run_ranks(2, failing_loader_job, path, fails, error)
    assert goes_on == too == [0, 0, 1, 1]
    assert failed[:-1] == peer[:-1] == ([] if fails == "begin" else [0, 0])
    assert failed[-1].startswith(reason)
    assert peer[-1].startswith(f"PeerFailed: UlyssesSPDataLoaderAdapter: no batch, since rank 1 failed with {reason}")


def loss_job(counts):
    rank = dist.get_rank()
    loss = torch.tensor(float("nan") if counts[rank] == 0 else rank + 1.0, requires_grad=True)
    mean = mean_over_sequence(loss, counts[rank], dist.get_world_group())
    (mean * 6).backward()
    return mean.item(), loss.grad.item()


@pytest.mark.parametrize(
    ("counts", "mean", "grads"), [([1, 3], 1.75, [3, 9]), ([0, 2], 2.0, [0, 12]), ([0, 0], 0.0, [0, 0])]
)
def test_the_mean_counts_each_token_once(counts, mean, grads):
    """The gradient is times the ranks, over which the engine averages: 6 * 2 * count / total."""
    assert run_ranks(2, loss_job, counts) == [(mean, grad) for grad in grads]


def unit_job():
    mpu = sequence_parallel_unit(2)
    sequence, data = (
        dist.get_all_ranks_from_group(group)
        for group in (mpu.get_sequence_parallel_group(), mpu.get_data_parallel_group())
    )
    with pytest.raises(ValueError) as caught:
        sequence_parallel_unit(3)
    return sequence, data, mpu.get_data_parallel_world_size(), mpu.get_model_parallel_world_size(), str(caught.value)


def test_neighbors_share_a_sequence():
    for rank, (sequence, data, dp, tp, message) in enumerate(run_ranks(4, unit_job)):
        assert sequence == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert data == [rank % 2, rank % 2 + 2]
        assert (dp, tp) == (2, 1)
        assert "found 3 for 4 ranks; give 1, 2 or 4" in message
