"""`CurriculumScheduler`: the difficulty of each step, for the old section `curriculum_learning` and for each metric of
the new section in `data_efficiency`. `Metric` and `Cluster` belong to the new section.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np

from deepspeed._absent import absent_members
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.errors import CheckpointError, ConfigError

_KEYS = ("min_difficulty", "max_difficulty", "schedule_type")
#: type -> required keys of its `schedule_config`
_SCHEDULES = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
#: in a checkpoint, the state of a generator takes as much space as the numbers of about this many samples
_SAMPLES_OF_A_STATE = 16


#: all schedules of the process: a script may make its own, beside the engine's
_SCHEDULERS: "WeakSet[CurriculumScheduler]" = WeakSet()


def is_only_scheduler(scheduler: "CurriculumScheduler") -> bool:
    """Return whether the process has no other schedule, which a script may ask for the difficulty instead."""
    return set(_SCHEDULERS) == {scheduler}


@absent_members("runtime.data_pipeline.curriculum_scheduler:CurriculumScheduler")
class CurriculumScheduler:
    """Computes the difficulty of a step. With `curriculum_type` "seqlen" the difficulty is the sequence length.

    Source: Li, Zhang, He, "The Stability-Efficiency Dilemma" (arXiv 2108.06084), section 4.

    - fixed_root: after `total_curriculum_step` steps the difficulty is `max_difficulty`; after a share s of them it is
      min + (max - min) * s^(1/root_degree), rounded down to a multiple of `difficulty_step`.
    - fixed_linear: fixed_root of degree 1.
    - fixed_discrete: `difficulty[i]` up to and including step `max_step[i]`, and then the last difficulty.
    - custom: the result of the function from `set_custom_get_difficulty`.

    >>> schedule = CurriculumScheduler(
    ...     {
    ...         "min_difficulty": 8,
    ...         "max_difficulty": 64,
    ...         "schedule_type": "fixed_linear",
    ...         "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
    ...     }
    ... )
    >>> [schedule.update_difficulty(step) for step in (1, 5, 10, 20)]
    [8, 32, 64, 64]

    Args:
        config: `min_difficulty`, `max_difficulty`, `schedule_type`, `schedule_config`.
        where: dotted key of `config`, for messages.

    Raises:
        ConfigError: a key is missing or wrong.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "curriculum_learning") -> None:
        for name in _KEYS:
            if name not in config:
                raise ConfigError(f"{where}.{name}: found nothing; a curriculum needs {', '.join(_KEYS)}")
        kind, written = config["schedule_type"], config.get("schedule_config") or {}
        if not isinstance(written, Mapping):
            raise ConfigError(f"{where}.schedule_config: found {written!r}; give an object with the schedule's keys")
        options = dict(written)
        for name in ("min_difficulty", "max_difficulty"):
            if not _is_number(config[name]):
                raise ConfigError(f"{where}.{name}: found {config[name]!r}; give a number")
        if kind not in _SCHEDULES:
            raise ConfigError(
                f"{where}.schedule_type: found {kind!r}; choose one of {', '.join(map(repr, _SCHEDULES))}"
            )
        for name in _SCHEDULES[kind]:
            if name not in options:
                raise ConfigError(
                    f"{where}.schedule_config.{name}: found nothing; {kind} needs {', '.join(_SCHEDULES[kind])}"
                )
        _check_numbers(f"{where}.schedule_config", kind, options)
        if config["min_difficulty"] > config["max_difficulty"]:
            raise ConfigError(
                f"{where}.min_difficulty: found {config['min_difficulty']}, above max_difficulty "
                f"{config['max_difficulty']}; give a smaller one"
            )
        self._where = where
        _SCHEDULERS.add(self)
        self.custom_get_difficulty: Callable[[int], int] | None = None
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
            "schedule_config": options,
        }

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step.

        Args:
            global_steps: the number of the step, from 1.

        Raises:
            ConfigError: the schedule is "custom", and no function was set.
        """
        kind, options = self.state["schedule_type"], self.state["schedule_config"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise ConfigError(
                    f"{self._where}.schedule_type: found 'custom' and no function; call "
                    "set_custom_get_difficulty(function) before the first step"
                )
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            ends = zip(options["difficulty"], options["max_step"], strict=False)  # the last difficulty has none
            return next((level for level, end in ends if global_steps <= end), options["difficulty"][-1])
        share = (global_steps / options["total_curriculum_step"]) ** (1 / options.get("root_degree", 1))
        lowest, highest = self.state["min_difficulty"], self.state["max_difficulty"]
        reached = math.floor(lowest + (highest - lowest) * share)
        return min(reached - reached % options["difficulty_step"], highest)

    def update_difficulty(self, global_steps: int) -> int:
        """Move to a step and return its difficulty. After the difficulty has reached its maximum, it stays there."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()

    def get_current_difficulty(self) -> int:
        """Return the difficulty of the last `update_difficulty`."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the difficulty until the next `update_difficulty`."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a schedule of type "custom": the number of a step, from 1 -> its difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return the state for `set_state`."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self.state = state


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(where: str, kind: str, options: Mapping[str, Any]) -> None:
    for name in set(options) & {"total_curriculum_step", "difficulty_step", "root_degree"}:
        if not _is_number(options[name]) or not options[name] > 0:
            raise ConfigError(f"{where}.{name}: found {options[name]!r}; give a number above 0")
    if kind == "fixed_discrete":
        levels, ends = options["difficulty"], options["max_step"]
        for name in ("difficulty", "max_step"):
            if not isinstance(options[name], list | tuple) or not all(map(_is_number, options[name])):
                raise ConfigError(f"{where}.{name}: found {options[name]!r}; give a list of numbers")
        if not levels or len(ends) != len(levels) - 1 or list(ends) != sorted(ends):
            raise ConfigError(
                f"{where}.max_step: found {ends} for difficulty {levels}; give rising steps, one for each difficulty "
                "but the last"
            )


@dataclass
class Metric:
    """One of `curriculum_metrics`: its schedule, and its values and samples.

    Args:
        values: the distinct values in ascending order; None for a metric that selects no samples (`single_cluster`).
        samples: the sample numbers of each distinct value.
    """

    scheduler: CurriculumScheduler
    is_percentile: bool
    values: np.ndarray | None = None
    samples: MMapIndexedDataset | None = None

    def up_to(self, difficulty: float) -> np.ndarray | None:
        """Return the numbers of the samples up to a difficulty, easy ones first; None for all of them."""
        if self.values is None or self.samples is None:
            return None
        end = len(self.samples) if self.is_percentile else int(np.searchsorted(self.values, difficulty, side="right"))
        chosen = [self.samples[number] for number in range(end)]
        found = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        return found[: _count(difficulty, len(found))] if self.is_percentile else found


def _count(percentile: float, num_samples: int) -> int:
    """Return how many samples a percentile is: whole hundredths, as in DeepSpeed; of fewer than 100 the share."""
    if percentile >= 100:
        return num_samples
    return int(num_samples // 100 * percentile if num_samples >= 100 else num_samples * percentile // 100)


def read_metric(where: str, written: Any) -> Metric:
    """Make a metric from its section, which stands at the dotted key `where`."""
    if not isinstance(written, Mapping):
        raise ConfigError(f"{where}: found {written!r}; give an object with min_difficulty, max_difficulty, ...")
    choices = {"difficulty_type": ("value", "percentile"), "clustering_type": ("schedule_based", "single_cluster")}
    for key, allowed in choices.items():
        if written.get(key) not in allowed:
            raise ConfigError(f"{where}.{key}: found {written.get(key)!r}; choose {' or '.join(map(repr, allowed))}")
    metric = Metric(CurriculumScheduler(written, where), written["difficulty_type"] == "percentile")
    if written["clustering_type"] == "single_cluster":
        return metric
    for key in ("index_to_sample_path", "index_to_metric_path"):
        if not isinstance(written.get(key), str):
            raise ConfigError(f"{where}.{key}: found {written.get(key)!r}; give the path of files of the data analyzer")
    metric.samples = MMapIndexedDataset(written["index_to_sample_path"])
    rows = list(MMapIndexedDataset(written["index_to_metric_path"]))
    if empty := [number for number, row in enumerate(rows) if not len(row)]:
        raise ConfigError(f"{where}.index_to_metric_path: found an empty row {empty[0]}; run the data analyzer again")
    metric.values = np.array([row[0] for row in rows])
    if not metric.is_percentile and len(metric.values) != len(metric.samples):
        raise ConfigError(
            f"{where}.index_to_sample_path: found {len(metric.samples)} groups of samples for {len(metric.values)} "
            "values; with difficulty_type 'value' give the index that is not merged into percentiles"
        )
    return metric


@dataclass
class Cluster:
    """Samples that were added together, in the order of drawing.

    Args:
        difficulties: the difficulty of each metric when the samples were added.
        samples: the sample numbers in the current order.
        shuffles: the state of the generator before each shuffle, so that a checkpoint needs no sample numbers.
        position: index of the next sample to draw.
        order: the samples before the first of `shuffles`; None: the original order. Saves space after many shuffles.
    """

    difficulties: dict[str, float]
    samples: np.ndarray
    shuffles: list[dict[str, Any]] = field(default_factory=list)
    position: int = 0
    order: list[int] | None = None

    def shuffle(self, generator: np.random.Generator) -> None:
        """Shuffle the samples, and restart at the first."""
        if len(self.shuffles) * _SAMPLES_OF_A_STATE > len(self.samples):
            self.order, self.shuffles = self.samples.tolist(), []
        # another list, for states that were taken share the former one
        self.shuffles = [*self.shuffles, copy.deepcopy(dict(generator.bit_generator.state))]
        generator.shuffle(self.samples)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "difficulties": dict(self.difficulties),
            "num_samples": len(self.samples),
            "shuffles": self.shuffles,
            "position": self.position,
            "order": self.order,
        }

    def restore(self, saved: Mapping[str, Any], generator: np.random.Generator) -> None:
        """Repeat the shuffles of a saved state."""
        order = saved.get("order")
        if order is not None:
            given = np.array(order)
            if not np.array_equal(np.sort(given), np.sort(self.samples)):
                raise CheckpointError(
                    f"data_sampler: found an order of other samples than those up to {self.difficulties}; give the "
                    "index files of the former run"
                )
            self.samples, self.order = given.astype(self.samples.dtype), list(order)
        self.shuffles, self.position = list(saved["shuffles"]), int(saved["position"])
        for state in self.shuffles:
            generator.bit_generator.state = state
            generator.shuffle(self.samples)
