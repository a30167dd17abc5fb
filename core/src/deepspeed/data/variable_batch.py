"""Batches of a number of tokens in place of a number of samples, and a learning rate that follows their sizes.

The section `data_efficiency.data_sampling.dynamic_batching`, under DeepSpeed's names. Samples are put into packs of at
most `max_tokens`; so many packs are a batch. Sources of the scaling: Goyal et al., "Accurate, Large Minibatch SGD"
(arXiv 1706.02677), section 2.1: with k times the batch k times the rate; Krizhevsky, "One weird trick" (arXiv
1404.5997), section 5: the square root of k.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from deepspeed._absent import absent_members
from deepspeed.config.intake import parse_section
from deepspeed.config.training import DataEfficiencyConfig
from deepspeed.data.analyzer import lengths_of_samples
from deepspeed.errors import CheckpointError, ConfigError, counted
from deepspeed.log import announce, warn_once
from deepspeed.optim.saved_state import check_schedule

_SECTION = "data_efficiency.data_sampling.dynamic_batching"
_ORDERS = ("dataloader", "random", "seqlen")
#: micro-batches as (number of the batch, numbers of the samples)
Packs = list[tuple[int, list[int]]]


def batch_by_seqlens(
    seqlens: Sequence[int] | torch.Tensor | np.ndarray,
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[Packs, list[int], list[int]]:
    """Put samples into packs of at most `max_tokens`, one after another, and packs into batches.

    A sample that is longer, a pack of fewer than `min_batch_size` and packs that are no whole batch are left out.

    >>> batch_by_seqlens([5, 5, 5, 11, 4, 30], max_tokens=15)
    ([(0, [0, 1, 2]), (1, [3, 4])], [3, 2], [5, 11])

    Args:
        seqlens: the length of each sample of the data set.
        sequence_ids_per_mb: the samples to put into packs, by number; None: all.
        max_batch_size: most samples of a pack; None: no limit.
        sequence_picking_order: "dataloader": as they come; "random"; "seqlen": short ones first.
        effective_batch_size: packs of a batch.
        required_microbatches_of_same_size: let all packs of a batch have as many samples, as a pipeline needs it.
        seed: of the random order.

    Returns:
        the packs, as (number of the batch, numbers of the samples); the samples of each batch; its longest sample.

    Raises:
        ConfigError: the order is none of these, a length is below 0, the bounds of a pack leave nothing between them,
            or no batch is whole.
    """
    if max_batch_size is not None and max_batch_size < min_batch_size:
        raise ConfigError(
            f"{_SECTION}.max_batch_size: found {max_batch_size}, below min_batch_size {min_batch_size}, so no pack is "
            "allowed; give a larger one, or null"
        )
    if sequence_picking_order not in _ORDERS:
        raise ConfigError(
            f"{_SECTION}.sequence_picking_order: found {sequence_picking_order!r}; choose one of "
            f"{', '.join(map(repr, _ORDERS))}"
        )
    lengths = [int(length) for length in seqlens]
    if lengths and min(lengths) < 0:
        raise ConfigError(
            f"{_SECTION}: found the length {min(lengths)} of sample {lengths.index(min(lengths))}; give the tokens of "
            "each sample, 0 or more"
        )
    ids = range(len(lengths)) if sequence_ids_per_mb is None else map(int, sequence_ids_per_mb)
    order = list(ids)
    if order and not 0 <= min(order) <= max(order) < len(lengths):
        outside = next(each for each in order if not 0 <= each < len(lengths))
        raise ConfigError(
            f"{_SECTION}: sample {outside} is asked for, and there are lengths of {len(lengths)} (0 to "
            f"{len(lengths) - 1}); give numbers of samples that have one"
        )
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(order)  # noqa: S311 - DeepSpeed's order
    elif sequence_picking_order == "seqlen":
        order.sort(key=lengths.__getitem__)
    fitting = [each for each in order if lengths[each] <= max_tokens]
    # packs of one size are filled in turn, all packs of a batch together
    together = effective_batch_size if required_microbatches_of_same_size else 1
    packs: list[list[int]] = []
    group: list[list[int]] = [[] for _ in range(together)]
    for first in range(0, len(fitting) - together + 1, together):
        given = fitting[first : first + together]
        is_full = max_batch_size is not None and len(group[0]) == max_batch_size
        tokens = [sum(lengths[each] for each in pack) + lengths[new] for pack, new in zip(group, given, strict=True)]
        if is_full or max(tokens) > max_tokens:
            packs += group if len(group[0]) >= min_batch_size else []
            group = [[] for _ in range(together)]
        for pack, new in zip(group, given, strict=True):
            pack.append(new)
    packs += group if len(group[0]) >= min_batch_size else []
    num_batches = len(packs) // effective_batch_size
    if num_batches == 0:
        raise ConfigError(
            f"{_SECTION}: found {len(packs)} packs of at most {max_tokens} tokens among {len(lengths)} samples; a "
            f"batch is {effective_batch_size} packs, so give more samples, a smaller batch or a smaller max_tokens"
        )
    numbered = [(place // effective_batch_size, pack) for place, pack in enumerate(packs)]
    numbered = numbered[: num_batches * effective_batch_size]
    sizes, longest = [0] * num_batches, [0] * num_batches
    for number, pack in numbered:
        sizes[number] += len(pack)
        longest[number] = max(longest[number], *(lengths[each] for each in pack))
    if verbose:
        announce(f"dynamic_batching: {num_batches} batches of {min(sizes)} to {max(sizes)} samples", is_asked_for=True)
    return numbered, sizes, longest


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear") -> float:
    """Return the learning rate of a batch, from that of a batch of `base_batch_size` samples.

    Raises:
        ValueError: the method is neither "linear" nor "sqrt" nor None.
    """
    if method is None or str(method).lower() == "none":
        return base_lr
    if method == "linear":
        return base_lr * batch_size / base_batch_size
    if method == "sqrt":
        return float(base_lr * (batch_size / base_batch_size) ** 0.5)
    raise ValueError(f"{_SECTION}.lr_scaling_method: found {method!r}; choose 'linear', 'sqrt' or None")


@absent_members("runtime.data_pipeline.data_sampling.variable_batch_size_and_lr:VariableBatchSizeLR")
class VariableBatchSizeLR:
    """Scales the learning rates of each batch by its size, on top of another schedule.

    The engine calls `step` after each step, as with other schedules, and `skip_batch` after one that it skips, whose
    batch is used up all the same; `step(0)` begins again.

    Args:
        lr_scheduler: the other one; None: the rates of `optimizer` stay.
        base_batch_size: the samples of a batch at these rates.
        batch_sizes: samples of each batch, in turn; after the last the first follows.
        dataloader: the loader that gives them; `load_state_dict` lets one of `dataloader_for_variable_batch_size` go
            on with the next batch.
        last_epoch: the batch before the next one.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
        *,
        optimizer: Optimizer | None = None,
    ) -> None:
        scale_lr(1, 1, method=lr_scaling_method)  # refuses another one now, not in the middle of a run
        self.base_lr_scheduler = lr_scheduler
        self.optimizer: Any = lr_scheduler.optimizer if optimizer is None else optimizer
        self.base_batch_size = base_batch_size
        self.batch_sizes = [int(size) for size in batch_sizes]
        self.dataloader = dataloader
        self.lr_scaling_method = lr_scaling_method
        self.verbose = verbose
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.last_epoch = last_epoch + 1
        self._scale()

    def get_lr(self) -> list[float]:
        """Return the rates of the next batch."""
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        return [scale_lr(self.base_batch_size, size, lr, self.lr_scaling_method) for lr in self.base_lrs]

    def get_last_lr(self) -> list[float]:
        """Return the rates that the optimizer has."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Move to the next batch, or to the one of number `epoch`."""
        if self.base_lr_scheduler is not None:
            self._set(self.base_lrs)  # the other one may go on from what it finds
            self.base_lr_scheduler.step(*([] if epoch is None else [epoch]))
            self.base_lrs = self.get_last_lr()
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def skip_batch(self) -> None:
        """Move to the next batch, and leave the other schedule, which counts steps that are made."""
        self.last_epoch += 1
        self._scale()

    def _scale(self) -> None:
        self._set(self.get_lr())

    def _set(self, rates: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        base = self.base_lr_scheduler
        return {
            "base_lr_scheduler": None if base is None else base.state_dict(),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": list(self.batch_sizes),
            "base_lrs": list(self.base_lrs),
            "last_epoch": self.last_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, and let the next iteration of the loader begin with the batch that follows.

        The sizes of the batches stay those of this run, whose loader gives them.

        Raises:
            CheckpointError: as `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        if self.base_lr_scheduler is not None and state_dict["base_lr_scheduler"] is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.lr_scaling_method = state_dict["lr_scaling_method"]
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._scale()
        found, place = list(state_dict["batch_sizes"]), self.last_epoch % len(self.batch_sizes)
        if found != self.batch_sizes:
            warn_once(
                f"{_SECTION}: found a checkpoint of {len(found)} batches of {sum(found)} samples, this run has "
                f"{len(self.batch_sizes)} of {sum(self.batch_sizes)}, or others; it goes on with batch {place} of its "
                "own. To go on with the samples that follow, keep the data set, max_tokens, seed and train_batch_size"
            )
        sampler = getattr(self.dataloader, "sampler", None)
        if isinstance(sampler, _PlacesOfPacks):
            sampler.begin_with_batch(place)

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise CheckpointError for what `load_state_dict` could not take; change nothing."""
        for name in ("base_lr_scheduler", "lr_scaling_method", "batch_sizes", "base_lrs", "last_epoch"):
            if not isinstance(state_dict, Mapping) or name not in state_dict:
                raise CheckpointError(
                    f"VariableBatchSizeLR: found no {name} in the saved state, so that another kind of schedule saved "
                    "it; load another tag, or with load_lr_scheduler_states=False"
                )
        counts, rates, sizes = state_dict["last_epoch"], state_dict["base_lrs"], state_dict["batch_sizes"]
        if not isinstance(counts, int) or counts < 0:
            raise CheckpointError(f"VariableBatchSizeLR: found last_epoch {counts!r:.60}; load another tag")
        for name, found in (("base_lrs", rates), ("batch_sizes", sizes)):
            if not isinstance(found, list) or not all(isinstance(each, int | float) for each in found):
                raise CheckpointError(f"VariableBatchSizeLR: found {name} {found!r:.60}; load another tag")
        groups = len(self.optimizer.param_groups)
        if len(rates) != groups:
            raise CheckpointError(
                f"VariableBatchSizeLR: found base_lrs {rates!r:.60}, for {counted(groups, 'param group')}; give the "
                "optimizer as many groups, or load with load_lr_scheduler_states=False"
            )
        if self.base_lr_scheduler is not None and state_dict["base_lr_scheduler"] is not None:
            check_schedule(self.base_lr_scheduler, state_dict["base_lr_scheduler"])


class _PlacesOfPacks(Sampler[int]):
    """Gives the places of a rank's packs in turn, once from a later batch on."""

    def __init__(self, packs: Packs) -> None:
        self._packs = packs
        self._first = 0

    def begin_with_batch(self, number: int) -> None:
        """Let the next iteration begin with a batch."""
        self._first = sum(batch < number for batch, _ in self._packs)

    def __len__(self) -> int:
        return len(self._packs)

    def __iter__(self) -> Iterator[int]:
        first, self._first = self._first, 0
        return iter(range(first, len(self._packs)))


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Return a `VariableBatchSizeLR` over a schedule, or over an optimizer whose rates stay."""
    is_optimizer = hasattr(lr_scheduler_or_optimizer, "param_groups")
    return VariableBatchSizeLR(
        None if is_optimizer else lr_scheduler_or_optimizer,
        base_batch_size,
        batch_sizes,
        dataloader,
        lr_scaling_method,
        verbose=verbose,
        optimizer=lr_scheduler_or_optimizer if is_optimizer else None,
    )


def dataloader_for_variable_batch_size(
    dataset: Dataset[Any],
    microbatch_ids: Packs,
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """Return the loader of this rank's packs, and what `engine.deepspeed_io` would make it of.

    Args:
        microbatch_ids, batch_max_seqlens: of `batch_by_seqlens`.
        dataloader_batch_size: packs that are collated together.
        required_microbatches_of_same_seqlen: let `sample_padding_fn(sample, length)` make all samples of a batch as
            long as its longest.

    Raises:
        ConfigError: the function is missing.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ConfigError(f"{_SECTION}: found samples to be of one length and no sample_padding_fn; pass one")
    own = microbatch_ids[dataloader_rank::dataloader_num_replicas]
    collate = dataloader_collate_fn or torch.utils.data.default_collate

    def load(packs: list[tuple[int, list[int]]]) -> Any:
        samples = []
        for number, ids in packs:
            for each in ids:
                sample = dataset[each]
                if required_microbatches_of_same_seqlen and sample_padding_fn is not None:
                    sample = sample_padding_fn(sample, batch_max_seqlens[number])
                samples.append(sample)
        return collate(samples)

    places = _PlacesOfPacks(own)
    made_of = {
        "dataset": own,
        "batch_size": dataloader_batch_size,
        "pin_memory": dataloader_pin_memory,
        "data_sampler": places,
        "collate_fn": load,
        "num_local_io_workers": dataloader_num_workers,
    }
    loader: DataLoader[Any] = DataLoader(
        own,  # type: ignore[arg-type]
        batch_size=dataloader_batch_size,
        sampler=places,
        collate_fn=load,
        num_workers=dataloader_num_workers,
        pin_memory=dataloader_pin_memory,
    )
    return loader, made_of


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Dataset[Any],
    dataset_seqlens: Sequence[int] | torch.Tensor | np.ndarray,
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR | None, dict[str, Any]]:
    """Return the loader of this rank's packs, the schedule of learning rates, and what `deepspeed_io` would be given.

    The arguments are those of `batch_by_seqlens`, `dataloader_for_variable_batch_size` and
    `lr_scheduler_for_variable_batch_size`. Without a schedule or an optimizer the second is None.
    """
    packs, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        min_batch_size,
        max_batch_size,
        sequence_picking_order,
        effective_batch_size,
        required_microbatches_of_same_size,
        verbose,
        seed,
    )
    loader, made_of = dataloader_for_variable_batch_size(
        dataset,
        packs,
        longest,
        dataloader_rank,
        dataloader_batch_size,
        dataloader_num_replicas,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
        required_microbatches_of_same_seqlen,
        sample_padding_fn,
    )
    schedule = None
    if lr_scheduler_or_optimizer is not None:
        schedule = lr_scheduler_for_variable_batch_size(
            effective_batch_size, sizes, loader, lr_scheduler_or_optimizer, lr_scaling_method, verbose
        )
    return loader, schedule, made_of


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Dataset[Any],
    engine: Any,
    dataset_seqlens: Sequence[int] | torch.Tensor | np.ndarray | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], torch.Tensor] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR | None, dict[str, Any]]:
    """Return loader, schedule and arguments of `deepspeed_io` by an engine's configuration; every rank calls it.

    `train_batch_size` is the packs of a batch, and `train_micro_batch_size_per_gpu` those that are collated together.
    Set `engine.lr_scheduler` to the schedule.

    Args:
        dataset_seqlens: None: read from `metrics_path`, where they are computed first if they are not there.
        batch_seqlens_fn: computes the lengths of the samples of a batch.

    Raises:
        ConfigError: the section is off, or lacks what is needed.
    """
    whole = parse_section(DataEfficiencyConfig, engine.data_efficiency_config(), "data_efficiency")
    sampling, section = whole.data_sampling, whole.data_sampling.dynamic_batching
    if not whole.asks_for_dynamic_batching():
        raise ConfigError(
            f"{_SECTION}.enabled: found false; switch on data_efficiency, data_sampling and dynamic_batching"
        )
    if section.max_tokens is None:
        raise ConfigError(f"{_SECTION}.max_tokens: found nothing; give the most tokens of a pack")
    if dataset_seqlens is None:
        dataset_seqlens = lengths_of_samples(dataset, section.metrics_path, dataloader_collate_fn, batch_seqlens_fn)
    in_pipeline = engine.mesh.size("pp") > 1
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        section.max_tokens,
        engine.train_batch_size(),
        dataset_filter_ids,
        section.lr_scaling_method,
        section.min_batch_size,
        section.max_batch_size,
        section.sequence_picking_order,
        engine.train_micro_batch_size_per_gpu(),
        engine.mesh.rank("dp"),
        engine.mesh.size("dp"),
        sampling.num_workers,
        dataloader_collate_fn,
        sampling.pin_memory,
        engine.lr_scheduler or engine.optimizer,
        in_pipeline,
        in_pipeline,
        sample_padding_fn,
        section.verbose,
        whole.seed,
    )
