"""The training data loader of `initialize(training_data=...)`, and one that never ends."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepspeed._absent_members import absent_members
from deepspeed.errors import ConfigError, counted


@absent_members("runtime.dataloader:RepeatingLoader")
class RepeatingLoader:
    """Starts the wrapped loader again when it is exhausted.

    Raises:
        ValueError: if the loader yields nothing.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._epoch = max(self._epoch, getattr(self.loader, "epoch", 0)) + 1
            sampler = getattr(self.loader, "sampler", None) or getattr(self.loader, "data_sampler", None)
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._epoch)
            self._iterator = iter(self.loader)
            try:
                return next(self._iterator)
            except StopIteration:
                raise ValueError("RepeatingLoader: found a loader without a single batch") from None


def check_data(asked: str, dataset: Any, collate_fn: Any, *, is_sampled: bool = False) -> None:
    """Refuse what a loader cannot be made of.

    Args:
        asked: what the user called, and its argument.
        dataset: the argument.
        collate_fn: beside it; None for torch's.
        is_sampled: whether a sampler is given, which knows the length.

    Raises:
        ConfigError: says what was found.
    """
    found = f"{asked} is {type(dataset).__name__}"
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"{found}; give its dataset, or go through the loader in the script itself")
    is_map_style = hasattr(dataset, "__getitem__") and (is_sampled or hasattr(dataset, "__len__"))
    if isinstance(dataset, str | bytes) or not (is_map_style or isinstance(dataset, IterableDataset)):
        raise ConfigError(
            f"{found}; give a dataset with __len__ and __getitem__, or an IterableDataset of torch.utils.data"
        )
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn is {type(collate_fn).__name__}; give a function that makes a batch of samples")


@absent_members("runtime.dataloader:DeepSpeedDataLoader")
class DeepSpeedDataLoader:
    """A `DataLoader` over this rank's share of a dataset.

    Args:
        dataset: map-style (sharded by a `DistributedSampler`) or iterable (must shard itself).
        batch_size: samples per rank and micro-batch.
        num_replicas, rank: of the data-parallel group.
        data_sampler: used instead of the distributed one.
        drop_last: drop the last batch if it is short. Samples that do not divide over the ranks are never dropped: some
            are given twice.
        seed: of the shuffling, the same on all ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        num_replicas: int,
        rank: int,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        data_sampler: Sampler[Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise ConfigError(
                    f"DeepSpeedDataLoader: the dataset is {type(dataset).__name__}, which has no length or no samples "
                    "by number, so that ranks cannot share it; pass a list, a torch.utils.data.Dataset, or an "
                    "IterableDataset that gives each rank its own samples"
                )
            data_sampler = DistributedSampler(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.epoch = 0
        self._num_replicas = num_replicas
        self._num_seen = 0  # samples of this rank that the next iteration leaves out
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
        }
        self.dataloader = DataLoader(dataset, sampler=data_sampler, **self._options)

    def resume(self, num_samples: int) -> None:
        """Let the next iteration begin after the samples that were trained on, by however many ranks.

        Call it after `load_checkpoint`, before the first batch: `loader.resume(engine.global_samples)`. Samples are in
        the same global batches for every number of ranks as long as the global batch is the same.

        Args:
            num_samples: since the beginning, of all ranks and epochs.

        Raises:
            ConfigError: the dataset is iterable, or its samples do not divide into whole batches of all ranks.
        """
        if self.data_sampler is None:
            raise ConfigError("resume: an iterable dataset decides by itself where it begins; have it leave them out")
        size, step = len(self.dataset), self.batch_size * self._num_replicas  # type: ignore[arg-type]
        if size % step or num_samples % step:
            raise ConfigError(
                f"resume: asked for {num_samples} of {size} samples, which are not whole batches of "
                f"{counted(self._num_replicas, 'rank')} x {self.batch_size} samples; let the dataset be a multiple of "
                "the global batch"
            )
        epoch, offset = divmod(num_samples, size)
        self.set_epoch(epoch)
        self._num_seen = offset // self._num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently in each epoch."""
        self.epoch = epoch
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        if not self._num_seen:
            return iter(self.dataloader)
        assert self.data_sampler is not None
        rest, self._num_seen = _Rest(self.data_sampler, self._num_seen), 0
        return iter(DataLoader(self.dataset, sampler=rest, **self._options))


class _Rest(Sampler[Any]):
    """`_Rest` is a sampler that yields what `sampler` does after its first `num_left_out` samples."""

    def __init__(self, sampler: Sampler[Any], num_left_out: int) -> None:
        self._sampler = sampler
        self._num_left_out = num_left_out

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._num_left_out, None)

    def __len__(self) -> int:
        return len(self._sampler) - self._num_left_out  # type: ignore[arg-type]
