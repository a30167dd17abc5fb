"""The training data loader of `initialize(training_data=...)`, and a loader that repeats forever.

The functions at the end move, transform, measure and compare the tensors in nested containers. They have the names of
DeepSpeed's `runtime.utils` and `runtime.zero.utils`. Containers are dicts, lists, tuples and named
tuples. No function modifies its arguments."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError, counted


@absent_members("runtime.dataloader:RepeatingLoader")
class RepeatingLoader:
    """Restarts the wrapped loader when it is exhausted.

    Raises:
        ValueError: the loader yields no batch, or no batch after a restart.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator = iter(loader)
        self._epoch = 0
        self._has_given = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._next_epoch()
            self._iterator = iter(self.loader)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise ValueError(self._empty()) from None
        self._has_given = True
        return batch

    def _empty(self) -> str:
        if not self._has_given:
            return "RepeatingLoader: found a loader without a single batch"
        return (
            "RepeatingLoader: found a loader that gives no more batches when it is started again; give one that does, "
            "or stop before. One with a curriculum ends after data_efficiency.data_sampling.num_epochs: give a higher "
            "number"
        )

    def _next_epoch(self) -> None:
        loader = self.loader
        if isinstance(loader, DeepSpeedDataLoader):  # it counts epochs; a loaded state may have changed the count
            loader.set_epoch(loader.epoch + 1)
            return
        self._epoch = max(self._epoch, getattr(loader, "epoch", 0)) + 1
        sampler = getattr(loader, "sampler", None) or getattr(loader, "data_sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)


def check_data(
    asked: str, dataset: Any, collate_fn: Any, *, is_sampled: bool = False, may_be_empty: bool = True
) -> None:
    """Refuse arguments that cannot make a loader.

    Args:
        asked: the user's call and argument, for the message.
        dataset: the argument.
        collate_fn: the collate function; None for torch's.
        is_sampled: whether a sampler is given, which knows the length.
        may_be_empty: False where the samples are to be trained on.

    Raises:
        ConfigError: an argument is invalid; the message has the type found.
    """
    found = f"{asked} is {type(dataset).__name__}"
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"{found}; give its dataset, or go through the loader in the script itself")
    is_map_style = hasattr(dataset, "__getitem__") and (is_sampled or hasattr(dataset, "__len__"))
    if isinstance(dataset, str | bytes) or not (is_map_style or isinstance(dataset, IterableDataset)):
        raise ConfigError(
            f"{found}; give a dataset with __len__ and __getitem__, or an IterableDataset of torch.utils.data"
        )
    if not may_be_empty and not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        raise ConfigError(f"{found} without a sample; give what to train on, or leave it out for a loader of your own")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn is {type(collate_fn).__name__}; give a function that makes a batch of samples")


@absent_members("runtime.dataloader:DeepSpeedDataLoader")
class DeepSpeedDataLoader:
    """A `DataLoader` over this rank's share of a dataset.

    Args:
        dataset: map-style (sharded by a `DistributedSampler`) or iterable (must shard itself).
        batch_size: number of samples per rank and micro-batch.
        num_replicas, rank: size and rank of the data-parallel group.
        data_sampler: used instead of a `DistributedSampler`.
        drop_last: drop the last batch if it is short. If the ranks cannot have equal shares, some samples are given
            twice, and none is dropped.
        seed: seed of the shuffling, equal on all ranks.
        deals: number of samples of a step over all ranks. Ranks then take turns by micro-batch, so that a micro-batch
            has the same samples for every number of ranks. An epoch is padded to full steps with samples from its
            beginning, or with `drop_last` truncated to full steps. None: ranks take turns sample by sample.
    """

    #: called with each batch of a curriculum and the state of its sampler; returns the batch
    post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None

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
        deals: int | None = None,
    ) -> None:
        self._has_own_sampler = data_sampler is None and not isinstance(dataset, IterableDataset)
        if self._has_own_sampler:
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise ConfigError(
                    f"DeepSpeedDataLoader: the dataset is {type(dataset).__name__}, which has no length or no samples "
                    "by number, so that ranks cannot share it; pass a list, a torch.utils.data.Dataset, or an "
                    "IterableDataset that gives each rank its own samples"
                )
            data_sampler = DistributedSampler(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
            if deals is not None:
                data_sampler = _DealingSampler(data_sampler, batch_size, deals, drop_last=drop_last)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = data_sampler
        self.epoch = 0
        self._num_replicas = num_replicas
        self._first = 0  # index of the next iteration's first sample in the epoch's global order
        self._num_given = 0  # samples of this epoch that all ranks have yielded
        self._num_moves = 0  # number of position changes: a running iteration then continues at the new position
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
        }
        self.dataloader = DataLoader(dataset, sampler=data_sampler, **self._options)

    def resume(self, num_samples: int) -> None:
        """Begin the next iteration after the samples that were already trained on, by any number of ranks.

        Call it after `load_checkpoint`, before the first batch: `loader.resume(engine.global_samples)`. Global batches
        have the same samples for every number of ranks if the global batch size is the same. If the dataset size is not
        a multiple of the global batch size, save `state_dict` with the checkpoint instead.

        Args:
            num_samples: number of samples so far, over all ranks and epochs.

        Raises:
            ConfigError: the dataset is iterable, or its samples do not divide into whole batches of all ranks, or the
                sampler is the script's.
        """
        self._require_place("resume")
        size, step = len(self.dataset), self.batch_size * self._num_replicas  # type: ignore[arg-type]
        if isinstance(self.data_sampler, _DealingSampler):  # whose epochs are whole steps
            size, step = self.data_sampler.total_size, self.data_sampler.step_size
        if size % step or num_samples % step:
            raise ConfigError(
                f"resume: asked for {num_samples} of {size} samples, which are not whole batches of "
                f"{counted(self._num_replicas, 'rank')} x {self.batch_size} samples; let the dataset be a multiple of "
                "the global batch, or save loader.state_dict() and call loader.load_state_dict(...)"
            )
        epoch, offset = divmod(num_samples, size)
        self._move(epoch, offset)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last yielded batch, for `load_state_dict` at any number of ranks.

        All ranks must have received the same number of batches.

        Raises:
            ConfigError: the dataset is iterable, or the sampler is the script's.
        """
        self._require_place("state_dict")
        assert isinstance(self.data_sampler, DistributedSampler)
        size = len(self.dataset)  # type: ignore[arg-type]
        return {"epoch": self.data_sampler.epoch, "num_samples": min(self._num_given, size), "size": size}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue at the position of `state_dict` without losing or repeating samples: in the next iteration, or in a
        running iteration.

        A run with another number of ranks or another batch size continues in the same order of samples. After the end
        of an epoch the next epoch begins.

        Raises:
            ConfigError: the dataset is iterable, or has another size, or the sampler is the script's.
        """
        self._require_place("load_state_dict")
        epoch, first, size = (int(state_dict[name]) for name in ("epoch", "num_samples", "size"))
        if size != len(self.dataset):  # type: ignore[arg-type]
            raise ConfigError(
                f"load_state_dict: found the state of a dataset of {size} samples, this one has "
                f"{len(self.dataset)}; give the loader the same dataset"  # type: ignore[arg-type]
            )
        if first >= size:
            epoch, first = epoch + 1, 0
        self._move(epoch, first)

    def _move(self, epoch: int, first: int) -> None:
        self.set_epoch(epoch)
        self._first = self._num_given = first
        self._num_moves += 1

    def _require_place(self, asked: str) -> None:
        if self.data_sampler is None:
            raise ConfigError(
                f"{asked}: an iterable dataset decides by itself where it begins; let the dataset leave out what was "
                "trained on"
            )
        if not self._has_own_sampler:
            raise ConfigError(
                f"{asked}: found a {type(self.data_sampler).__name__} of the script's, which decides by itself which "
                "sample is next; let it go on from a place of its own, or leave data_sampler out"
            )

    def set_epoch(self, epoch: int) -> None:
        """Use this number for the shuffling from the next iteration on.

        A script calls it before each epoch, as for a `DistributedSampler`; otherwise every epoch has the same order.
        `RepeatingLoader` calls it automatically.
        """
        if epoch != self.epoch:
            self._first = self._num_given = 0
        self.epoch = epoch
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        num_moves = None
        while num_moves != self._num_moves:  # batches that workers loaded for the former position are discarded
            num_moves = self._num_moves
            for batch in self._from_place():
                yield batch
                if num_moves != self._num_moves:
                    break

    def _from_place(self) -> Iterator[Any]:
        loader, self._num_given = self.dataloader, self._first
        if self._first:
            assert isinstance(self.data_sampler, DistributedSampler)
            rest, self._first = _rest(self.data_sampler, self._first), 0
            loader = DataLoader(self.dataset, sampler=rest, **self._options)
        for batch in loader:
            self._num_given += self.batch_size * self._num_replicas
            yield batch
        if self._has_own_sampler:
            self._num_given = len(self.dataset)  # type: ignore[arg-type]  # a short batch that is dropped counts


class _DealingSampler(DistributedSampler[Any]):
    """A `DistributedSampler` that distributes full micro-batches; see `deals` of `DeepSpeedDataLoader`.

    Args:
        like: provides dataset, ranks and shuffling.
        batch_size: number of samples of a micro-batch.
        step_size: number of samples of a step over all ranks.
        drop_last: drop samples that do not fill a step.
    """

    def __init__(self, like: DistributedSampler[Any], batch_size: int, step_size: int, *, drop_last: bool) -> None:
        super().__init__(like.dataset, like.num_replicas, like.rank, shuffle=like.shuffle, seed=like.seed)
        assert step_size % (batch_size * self.num_replicas) == 0
        self._batch_size, self.step_size, self._drops = batch_size, step_size, drop_last
        size = len(like.dataset)  # type: ignore[arg-type]
        self.total_size = (size // step_size if drop_last else -(-size // step_size)) * step_size
        self.num_samples = self.total_size // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        return iter(_rest(self, 0))

    def share(self, rest: list[Any], order: list[Any]) -> list[Any]:
        """Return this rank's micro-batches of `rest`, the end of an epoch with the samples `order`."""
        if self._drops:
            rest = rest[: len(rest) // self.step_size * self.step_size]
        rest = rest + list(islice(cycle(order), -len(rest) % self.step_size))
        turn = self._batch_size * self.num_replicas
        first = self._batch_size * self.rank
        return [each for start in range(first, len(rest), turn) for each in rest[start : start + self._batch_size]]


def _rest(sampler: DistributedSampler[Any], num_left_out: int) -> list[Any]:
    """Return this rank's samples of an epoch, without the first `num_left_out` samples of all ranks.

    Ranks take turns in a common order: with a `DistributedSampler`, a rank gets every `num_replicas`-th sample. The end
    is padded with samples from the beginning, as torch does.
    """
    dataset, shuffle, seed = sampler.dataset, sampler.shuffle, sampler.seed
    whole: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=seed)
    whole.set_epoch(sampler.epoch)
    order = list(whole)
    rest = order[num_left_out:]
    if isinstance(sampler, _DealingSampler):
        return sampler.share(rest, order)
    rest += list(islice(cycle(order), -len(rest) % sampler.num_replicas))
    return rest[sampler.rank :: sampler.num_replicas]


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return `item` with all its tensors on `device`. Containers are copied; other values are passed through.

    Training scripts call it on the batches of a loader.

    Args:
        item: a tensor, or nested dicts, lists and tuples of tensors.
        criterion_func: called for each leaf; if it returns False, the leaf does not change.
    """

    def move(leaf: Any) -> Any:
        if criterion_func is not None and not criterion_func(leaf):
            return leaf
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return _mapped(move, item)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """Call `move_to_device`. Tensors that are already on `device` are not copied."""
    return move_to_device(item, device, criterion_func)


def apply_to_tensors_only(
    function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """Return `value` with `function(tensor)` in place of every tensor.

    Args:
        warning_msg_fn: accepted for compatibility, and ignored: all containers are supported.
    """
    return _mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def get_tensor_bytes(item: Any) -> int:
    """Return the number of bytes of all tensors in `item`."""
    return sum(leaf.numel() * leaf.element_size() for leaf in _leaves(item) if isinstance(leaf, Tensor))


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Return whether both arguments have the same containers with equal tensors or values.

    Equal tensors also have the same dtype, device and shape.
    """
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, Mapping):
        same = compare_tensors_in_structures
        return inputs1.keys() == inputs2.keys() and all(same(value, inputs2[key]) for key, value in inputs1.items())
    if isinstance(inputs1, list | tuple):
        pairs = zip(inputs1, inputs2, strict=False)
        return len(inputs1) == len(inputs2) and all(compare_tensors_in_structures(*pair) for pair in pairs)
    if isinstance(inputs1, Tensor):
        is_alike = inputs1.dtype == inputs2.dtype and inputs1.device == inputs2.device
        return is_alike and torch.equal(inputs1, inputs2)
    return bool(inputs1 == inputs2)


def isinstance_namedtuple(obj: object) -> bool:
    """Return whether `obj` is a named tuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def _mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """Return `item` with `function(leaf)` in place of each leaf. Containers keep their class."""
    if isinstance(item, Mapping):
        values = {key: _mapped(function, value) for key, value in item.items()}
        if type(item) is dict:
            return values
        made: Any = copy.copy(item)  # such as a BatchEncoding of transformers, whose constructor takes more
        for key, value in values.items():
            made[key] = value
        return made
    if isinstance_namedtuple(item):
        return type(item)(*(_mapped(function, value) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(_mapped(function, value) for value in item)
    return function(item)


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, list | tuple):
        for value in item:
            yield from _leaves(value)
    else:
        yield item
