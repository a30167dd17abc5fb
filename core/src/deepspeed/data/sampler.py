"""`DeepSpeedDataSampler`: draws easy samples first (section `data_efficiency.data_sampling.curriculum_learning`).

`CurriculumLoader` loads the drawn samples. The module is imported only if the configuration or a script uses it.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
from torch.utils.data import DataLoader, Dataset

from deepspeed._absent import absent_members
from deepspeed.config.intake import parse_section
from deepspeed.config.training import DataEfficiencyConfig
from deepspeed.data.curriculum import Cluster, read_metric
from deepspeed.data.indexed_dataset import find_fit_int_dtype
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import warn_once

_SECTION = "data_efficiency.data_sampling.curriculum_learning"


@dataclass
class _Drawn:
    """A drawn global batch: the number of its first micro-batch, its samples, and the state after the draw."""

    first: int
    samples: list[int]
    state: dict[str, Any]


#: all samplers of the process: a script may make its own, for a loader of its own
_SAMPLERS: "WeakSet[DeepSpeedDataSampler]" = WeakSet()


@absent_members("runtime.data_pipeline.data_sampling.data_sampler:DeepSpeedDataSampler")
class DeepSpeedDataSampler:
    """Yields the numbers of this rank's samples, one micro-batch at a time, easy samples first.

    Source: Li et al., "DeepSpeed Data Efficiency" (arXiv 2212.03597), section 3.1. Each step has one difficulty per
    metric. Samples that are within all difficulties for the first time form a cluster in random order. The expected
    number of samples of a cluster in a global batch is proportional to the cluster's size. Each cluster is drawn in its
    order, and shuffled again at its end. All ranks draw the same global batches, which depend only on the seed, the
    index files and `train_batch_size`: a run can continue with another number of ranks.

    Args:
        data_efficiency_config: the section `data_efficiency`.
        one_epoch_total_samples: size of the data set. The sampler ends after `num_epochs` times this number.
        micro_batch_size: number of samples per rank and micro-batch.
        data_parallel_group: ignored; ranks draw the same batches without communication.
        global_rank: ignored.
        drop_last: ignored; no micro-batch is short.

    Raises:
        ConfigError: a key is missing or wrong, or an index file cannot be read.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any] | DataEfficiencyConfig,
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        if not isinstance(data_efficiency_config, DataEfficiencyConfig):
            data_efficiency_config = parse_section(DataEfficiencyConfig, data_efficiency_config, "data_efficiency")
        sampling = data_efficiency_config.data_sampling
        self.one_epoch_total_samples = one_epoch_total_samples
        self.total_samples = one_epoch_total_samples * sampling.num_epochs
        self.data_parallel_rank = data_parallel_rank
        self._data_parallel_size = data_parallel_size
        self._set_sizes(micro_batch_size, gradient_accumulation_steps)
        self.drop_last = drop_last
        self.np_rng = np.random.default_rng(data_efficiency_config.seed)
        self.batch: list[int] = []
        self.consumed_samples = 0
        self.curriculum_step = 0
        self.current_difficulties: dict[str, float] = {}
        self._metrics = {
            name: read_metric(f"{_SECTION}.curriculum_metrics.{name}", written)
            for name, written in sampling.curriculum_learning.curriculum_metrics.items()
        }
        if not self._metrics:
            raise ConfigError(f"{_SECTION}.curriculum_metrics: found none; give one or more, each under its name")
        self._clusters: list[Cluster] = []
        self._num_yielded = 0  # micro-batches
        self._num_delivered: int | None = None
        self._drawn: deque[_Drawn] = deque()
        self.num_loads = 0  # of states; a load makes the loader restart its iteration
        _SAMPLERS.add(self)

    def _set_sizes(self, micro_batch_size: int, num_steps: int) -> None:
        self.micro_batch_size = micro_batch_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * self._data_parallel_size
        self.gradient_accumulation_steps = num_steps
        self.global_batch_size = self.micro_batch_times_data_parallel_size * num_steps

    def set_batch(self, micro_batch_size: int, num_steps: int) -> None:
        """Change the batch sizes after the rest of the current global batch."""
        if (micro_batch_size, num_steps) != (self.micro_batch_size, self.gradient_accumulation_steps):
            state = self.state_dict()  # of the yielded batches; batches that workers drew in advance are drawn again
            self._set_sizes(micro_batch_size, num_steps)
            self.load_state_dict(state)

    def __len__(self) -> int:
        return self.total_samples

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set the functions of the metrics whose schedule is "custom": the number of a step, from 1 -> difficulty."""
        for name, function in schedule_func_dict.items():
            if name not in self._metrics:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: asked for metric {name!r}; the configuration has "
                    f"{', '.join(map(repr, self._metrics))}"
                )
            self._metrics[name].scheduler.set_custom_get_difficulty(function)

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return where this rank's samples begin and end in the micro-batch of all ranks (of `batch_len` samples)."""
        whole = self.micro_batch_times_data_parallel_size if batch_len is None else batch_len
        rank, num_ranks = self.data_parallel_rank, self._data_parallel_size
        return whole * rank // num_ranks, whole * (rank + 1) // num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed_samples < self.total_samples:
            size = self.micro_batch_times_data_parallel_size  # it may change meanwhile
            if len(self.batch) < size:
                self.get_next_global_batch()
            given, self.batch = self.batch[:size], self.batch[size:]
            self.consumed_samples += len(given)
            self._num_yielded += 1
            start, end = self.get_start_end_idx(len(given))
            yield given[start:end]

    def get_next_global_batch(self) -> None:
        """Move to the next step, and append its samples to the remaining samples of the last step."""
        self.curriculum_step += 1
        former = dict(self.current_difficulties)
        for name, metric in self._metrics.items():
            self.current_difficulties[name] = metric.scheduler.update_difficulty(self.curriculum_step)
        if self.current_difficulties != former:
            self._add_cluster(self.current_difficulties)
        self.batch = self.batch + self._draw(self.global_batch_size)
        if self._num_delivered is None:
            self._drawn.clear()
        self._drawn.append(_Drawn(self._num_yielded, self.batch, self._state()))

    def _add_cluster(self, difficulties: Mapping[str, float]) -> None:
        """Add a cluster of the samples that are within the difficulties for the first time, if any."""
        samples = self._new_samples(difficulties, self._clusters)
        if len(samples):
            cluster = Cluster(dict(difficulties), samples)
            cluster.shuffle(self.np_rng)
            self._clusters.append(cluster)

    def _new_samples(self, difficulties: Mapping[str, float], former: list[Cluster]) -> np.ndarray:
        """Return the samples within the difficulties that are in no former cluster."""
        found: np.ndarray | None = None
        for name, metric in self._metrics.items():
            own = metric.up_to(difficulties[name])
            if own is not None:
                if len(own) and not 0 <= own.min() <= own.max() < self.one_epoch_total_samples:
                    wrong = own.min() if own.min() < 0 else own.max()
                    raise ConfigError(
                        f"{_SECTION}.curriculum_metrics.{name}.index_to_sample_path: found sample {wrong} of a data "
                        f"set of {self.one_epoch_total_samples} samples; give the index of this data set"
                    )
                found = own if found is None else np.intersect1d(found, own, assume_unique=True)
        if found is None:
            found = np.arange(self.one_epoch_total_samples)
        found = found.astype(find_fit_int_dtype(0, self.one_epoch_total_samples))
        for cluster in former:
            found = np.setdiff1d(found, cluster.samples, assume_unique=True)
        return found

    def _draw(self, count: int) -> list[int]:
        if not self._clusters:
            raise ConfigError(
                f"{_SECTION}: found no sample within {self.current_difficulties}, of step {self.curriculum_step}; "
                "give a higher min_difficulty"
            )
        sizes = np.array([len(cluster.samples) for cluster in self._clusters])
        chosen = self.np_rng.choice(len(sizes), count, replace=True, p=sizes / sizes.sum())
        batch: list[int] = []
        for cluster, num in zip(self._clusters, np.bincount(chosen, minlength=len(sizes)), strict=True):
            batch += self._take(cluster, int(num))
        self.np_rng.shuffle(batch)
        return batch

    def _take(self, cluster: Cluster, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            if cluster.position == len(cluster.samples):
                cluster.shuffle(self.np_rng)
            end = cluster.position + count - len(taken)
            taken += cluster.samples[cluster.position : end].tolist()
            cluster.position = min(end, len(cluster.samples))
        return taken

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def begin_delivery(self) -> None:
        """Begin to count the micro-batches that a loader yields, because its workers draw more in advance. If an
        iteration stopped early, the micro-batches that its workers drew in advance are drawn again."""
        if self._num_delivered not in (None, self._num_yielded):
            self.load_state_dict(self.state_dict())
        self._num_delivered = self._num_yielded

    def delivered(self) -> None:
        """Count a micro-batch that the loader yields."""
        assert self._num_delivered is not None
        self._num_delivered += 1
        while len(self._drawn) > 1 and self._drawn[1].first < self._num_delivered:
            self._drawn.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` at any number of ranks: small plain values."""
        if not self._drawn:
            return self._state()
        drawn, number = self._drawn[0], self._num_yielded if self._num_delivered is None else self._num_delivered
        num_given = (number - drawn.first) * self.micro_batch_times_data_parallel_size
        return {
            **drawn.state,
            "batch": drawn.samples[num_given:],
            "consumed_samples": drawn.state["consumed_samples"] + min(num_given, len(drawn.samples)),
        }

    def _state(self) -> dict[str, Any]:
        return {
            "batch": list(self.batch),
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "np_rng_state": copy.deepcopy(dict(self.np_rng.bit_generator.state)),
            "clusters": [cluster.state_dict() for cluster in self._clusters],
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` cannot load.

        Raises:
            CheckpointError: the state has other metrics or index files, or is damaged.
        """
        self._check_keys(state_dict)
        self._restored(state_dict)

    def _check_keys(self, state_dict: Mapping[str, Any]) -> None:
        if missing := [key for key in ("consumed_samples", "curriculum_step") if key not in state_dict]:
            raise CheckpointError(f"data_sampler: found a state without {', '.join(missing)}; load another checkpoint")
        metrics = state_dict.get("current_difficulties", {})
        if metrics and set(metrics) != set(self._metrics):
            raise CheckpointError(
                f"data_sampler: found a state of the metrics {sorted(metrics)}, this run has {sorted(self._metrics)}; "
                "give it the same curriculum_metrics"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the micro-batches that were yielded before `state_dict` was called.

        DeepSpeed's state has no generator state: the steps continue, but samples are drawn as in a new run.

        Raises:
            CheckpointError: the state has other metrics or index files, or is damaged.
        """
        self._check_keys(state_dict)
        self._clusters, generator = self._restored(state_dict)
        metrics = state_dict.get("current_difficulties", {})
        self.batch = list(state_dict.get("batch", ()))
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.curriculum_step = int(state_dict["curriculum_step"])
        self.current_difficulties = dict(metrics)
        for name, metric in self._metrics.items():
            metric.scheduler.set_current_difficulty(metrics.get(name, metric.scheduler.state["min_difficulty"]))
        if "clusters" in state_dict:
            self.np_rng = generator
        else:
            warn_once(
                "data_sampler: found DeepSpeed's state, which has no generator; samples are drawn as in a new run"
            )
            self.current_difficulties = {}
        self._num_yielded = 0
        self._num_delivered = None if self._num_delivered is None else 0
        self._drawn.clear()
        if self.batch:  # it is yielded first, whatever workers draw in advance
            self._drawn.append(_Drawn(0, self.batch, self._state()))
        self.num_loads += 1

    def _restored(self, state_dict: Mapping[str, Any]) -> tuple[list[Cluster], np.random.Generator]:
        """Rebuild the clusters of a checkpoint from the index files, and its generator if the state has one."""
        generator = np.random.default_rng()
        clusters: list[Cluster] = []
        try:
            for saved in state_dict.get("clusters", ()):
                cluster = Cluster(dict(saved["difficulties"]), self._new_samples(saved["difficulties"], clusters))
                if len(cluster.samples) != saved["num_samples"]:
                    raise CheckpointError(
                        f"data_sampler: found {len(cluster.samples)} samples up to {cluster.difficulties} where the "
                        f"checkpoint had {saved['num_samples']}; give the index files of the former run"
                    )
                cluster.restore(saved, generator)
                clusters.append(cluster)
            if "clusters" in state_dict:
                generator.bit_generator.state = state_dict["np_rng_state"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"data_sampler: found a damaged state ({type(error).__name__}: {error}); load another checkpoint"
            ) from error
        return clusters, generator


class CurriculumLoader(DeepSpeedDataLoader):
    """Loads this rank's samples of a `DeepSpeedDataSampler`. An iteration continues where the last one ended.

    Args:
        sampler: the sampler. Its state counts the yielded batches, not batches that workers load in advance.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: DeepSpeedDataSampler,
        *,
        pin_memory: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = sampler.micro_batch_size
        self.data_sampler: Any = sampler
        self.epoch = 0
        self.dataloader = DataLoader(
            dataset, batch_sampler=sampler, pin_memory=pin_memory, collate_fn=collate_fn, num_workers=num_workers
        )

    def resume(self, num_samples: int) -> None:
        """Refuse: `load_checkpoint` restores the sampler."""
        raise ConfigError(
            "resume: a loader with a curriculum goes on where the checkpoint was saved once load_checkpoint has loaded "
            "it; leave the call out"
        )

    def __len__(self) -> int:
        return len(self.data_sampler)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.data_sampler
        sampler.begin_delivery()
        num_loads = None
        while num_loads != sampler.num_loads:  # batches that workers loaded for the former state are dropped
            num_loads, self.batch_size = sampler.num_loads, sampler.micro_batch_size
            for batch in self.dataloader:
                sampler.delivered()
                process = self.post_process_func
                yield batch if process is None else process(batch, sampler.state_dict())
                if num_loads != sampler.num_loads:
                    break

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler."""
        return self.data_sampler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of the sampler."""
        self.data_sampler.load_state_dict(state_dict)


class Curriculum:
    """The engine's part for the section `data_efficiency.data_sampling`. Built by `build.py`. Creates the loaders of
    the training data, and adds the state of their sampler to checkpoints.

    Args:
        section: the section `data_efficiency`.
        micro_batch_size: number of samples per rank and micro-batch.
        num_steps: number of micro-batches per step.
        rank: the data-parallel rank.
        num_replicas: the number of data-parallel ranks.
        gather: returns the values of all pipeline stages, in order; None: there is one stage.
    """

    def __init__(
        self,
        section: DataEfficiencyConfig,
        *,
        micro_batch_size: int,
        num_steps: int,
        rank: int,
        num_replicas: int,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self._section = section
        self._sizes = micro_batch_size, num_steps
        self._ranks = rank, num_replicas
        self._gather = gather
        self._of_first_stage: dict[str, Any] | None = None
        self._dataset: Dataset[Any] | None = None
        self._pending: Mapping[str, Any] | None = None  # a state that was loaded before the sampler existed
        self.sampler: DeepSpeedDataSampler | None = None

    def draws(self, dataset: Dataset[Any]) -> bool:
        """Return whether `dataset` is the training data: the first dataset that got a loader."""
        return self._dataset is None or self._dataset is dataset

    def loader(
        self, dataset: Dataset[Any], batch_size: int | None = None, *, can_pin: bool = False, **options: Any
    ) -> CurriculumLoader:
        """Return a loader of the training data. All loaders share one sampler, so each continues where the last ended.

        Args:
            batch_size: None, or the configured micro-batch size.
            can_pin: whether page-locked memory is available, for the key `data_sampling.pin_memory`.
            options: further arguments of `CurriculumLoader`.

        Raises:
            ConfigError: the dataset has no `__len__`, or `batch_size` is another size.
            CheckpointError: a state that was loaded before does not fit this dataset.
        """
        assert self.draws(dataset)
        if batch_size not in (None, self._sizes[0]):
            raise ConfigError(
                f"deepspeed_io: batch_size: asked for {batch_size}, and the curriculum draws micro-batches of "
                f"{self._sizes[0]}; leave it out, or set train_micro_batch_size_per_gpu"
            )
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{_SECTION}: found a dataset of type {type(dataset).__name__}, whose samples have no numbers; give "
                "one with __len__ and __getitem__, as the data analyzer had it"
            )
        if self.sampler is None:
            (micro_batch_size, num_steps), (rank, num_replicas) = self._sizes, self._ranks
            sampler = DeepSpeedDataSampler(
                self._section, len(dataset), micro_batch_size, rank, num_replicas, None, num_steps, rank
            )
            if self._pending is not None:
                sampler.load_state_dict(self._pending)
            self.sampler, self._dataset, self._pending = sampler, dataset, None
        sampling = self._section.data_sampling
        options["num_workers"] = options.get("num_workers") or sampling.num_workers
        if "pin_memory" in sampling.model_fields_set:
            options["pin_memory"] = sampling.pin_memory and can_pin
        return CurriculumLoader(dataset, self.sampler, **options)

    def set_batch(self, micro_batch_size: int, num_steps: int) -> None:
        """Change the batch sizes after the rest of the current global batch."""
        self._sizes = micro_batch_size, num_steps
        if self.sampler is not None:
            self.sampler.set_batch(micro_batch_size, num_steps)

    def set_schedules(self, functions: Mapping[str, Callable[[int], int]]) -> None:
        """Set the functions of metrics whose schedule is "custom"."""
        self._needed("set_custom_curriculum_learning_schedule").set_custom_curriculum_learning_schedule(functions)

    def _needed(self, asked: str) -> DeepSpeedDataSampler:
        if self.sampler is None:
            raise ConfigError(f"{asked}: found no training data; pass initialize(training_data=...) first")
        return self.sampler

    def warn_if_idle(self, step: int, *, applied: bool, scale: float) -> None:
        """Warn once if a whole step has passed without a sampler: its samples came from the script's own loader."""
        if self.sampler is None and not _SAMPLERS:
            warn_once(
                f"{_SECTION}: found a curriculum, and no loader that draws by it, so that it changes nothing; pass "
                "initialize(training_data=...), or train with the loader that engine.deepspeed_io(dataset) returns"
            )

    def agree(self) -> None:
        """Share the first stage's state for `state_dict`, because stages in the middle draw no samples. A collective of
        the pipeline stages, before a save."""
        if self._gather is not None:
            self._of_first_stage = self._gather(self._own_state())[0]

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the sampler; without training data, the loaded state, or None. In a pipeline, return the
        first stage's state at the last `agree`."""
        return self._own_state() if self._gather is None else self._of_first_stage

    def _own_state(self) -> dict[str, Any] | None:
        if self.sampler is None:
            return None if self._pending is None else dict(self._pending)
        return self.sampler.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` cannot load. Changes nothing."""
        if self.sampler is not None:
            self.sampler.check_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the sampler. If there is no sampler yet, `loader` loads the state later."""
        if self.sampler is None:
            self._pending = state
        else:
            self.sampler.load_state_dict(state)
