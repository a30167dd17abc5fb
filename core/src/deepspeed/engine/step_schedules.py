"""`StepSchedules`: what the number of the step gives to a forward, a length that grows or a share of layers that falls.

`CurriculumScheduler` is the section `curriculum_learning`, `ProgressiveLayerDrop` the section `progressive_layer_drop`,
both under DeepSpeed's names, which later versions of DeepSpeed removed. The model's own forward takes the arguments and
does the rest. Imported only where the configuration asks for one.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed._absent_members import absent_members
from deepspeed.config.training import CurriculumConfig, ProgressiveLayerDropConfig
from deepspeed.errors import ConfigError

__all__ = ["CurriculumScheduler", "ProgressiveLayerDrop", "StepSchedules"]

_KEYS = ("min_difficulty", "max_difficulty", "schedule_type")
#: type -> what its `schedule_config` needs
_SCHEDULES = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


@absent_members("runtime.data_pipeline.curriculum_scheduler:CurriculumScheduler")
class CurriculumScheduler:
    """Computes the difficulty of a step: with `curriculum_type` "seqlen" the length of its sequences.

    Source: Li, Zhang, He, "The Stability-Efficiency Dilemma" (arXiv 2108.06084), section 4.

    - fixed_root: after `total_curriculum_step` steps the difficulty is `max_difficulty`; after a share s of them it is
      min + (max - min) * s^(1/root_degree), rounded down to a multiple of `difficulty_step`.
    - fixed_linear: fixed_root of degree 1.
    - fixed_discrete: `difficulty[i]` up to and with step `max_step[i]`; the last one, which has no end, after that.
    - custom: what the function says that `set_custom_get_difficulty` was given.

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

    Raises:
        ConfigError: a key is missing or wrong.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        where = "curriculum_learning"
        for name in _KEYS:
            if name not in config:
                raise ConfigError(f"{where}.{name}: found nothing; a curriculum needs {', '.join(_KEYS)}")
        kind, options = config["schedule_type"], dict(config.get("schedule_config") or {})
        if kind not in _SCHEDULES:
            raise ConfigError(
                f"{where}.schedule_type: found {kind!r}; choose one of {', '.join(map(repr, _SCHEDULES))}"
            )
        for name in _SCHEDULES[kind]:
            if name not in options:
                raise ConfigError(
                    f"{where}.schedule_config.{name}: found nothing; {kind} needs {', '.join(_SCHEDULES[kind])}"
                )
        _check_numbers(kind, options)
        if config["min_difficulty"] > config["max_difficulty"]:
            raise ConfigError(
                f"{where}.min_difficulty: found {config['min_difficulty']}, above max_difficulty "
                f"{config['max_difficulty']}; give a smaller one"
            )
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
                    "curriculum_learning.schedule_type: found 'custom' and no function; call "
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
        """Move to a step and return its difficulty. One that has reached the highest stays there."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()

    def get_current_difficulty(self) -> int:
        """Return the difficulty of the step that `update_difficulty` was called for last."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Go on from another difficulty, up to the next `update_difficulty`."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a schedule of type "custom": the number of a step, from 1 -> its difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` takes."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` returned."""
        self.state = state


def _check_numbers(kind: str, options: Mapping[str, Any]) -> None:
    where = "curriculum_learning.schedule_config"
    for name in set(options) & {"total_curriculum_step", "difficulty_step", "root_degree"}:
        if not isinstance(options[name], int | float) or isinstance(options[name], bool) or not options[name] > 0:
            raise ConfigError(f"{where}.{name}: found {options[name]!r}; give a number above 0")
    if kind == "fixed_discrete":
        levels, ends = options["difficulty"], options["max_step"]
        if not levels or len(ends) != len(levels) - 1 or list(ends) != sorted(ends):
            raise ConfigError(
                f"{where}.max_step: found {ends} for difficulty {levels}; give rising steps, one for each difficulty "
                "but the last"
            )


class ProgressiveLayerDrop:
    """Computes the share of layers that a step keeps: theta(t) = (1 - theta) * exp(-gamma * t) + theta.

    Source: Zhang, He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping"
    (arXiv 2010.13369), section 4.

    Args:
        theta: the share in the limit, from 0 to 1.
        gamma: how fast it falls, per step; 0: never.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def update_state(self, global_step: int) -> None:
        """Move to the share after so many steps."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta

    def get_theta(self) -> float:
        """Return the share of this step."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """Return the arguments of a forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}


class StepSchedules:
    """Gives each forward that trains its arguments. They follow from the number of steps alone, so that a run that
    goes on from a checkpoint goes on with them.

    Args:
        curriculum: the section; off where it is not enabled.
        layer_drop: the section; off where it is not enabled.
        num_steps: returns the steps so far.
    """

    def __init__(
        self, curriculum: CurriculumConfig, layer_drop: ProgressiveLayerDropConfig, num_steps: Callable[[], int]
    ) -> None:
        # only what is written: nobody means the defaults of a length
        written = curriculum.model_dump(exclude_unset=True)
        self.curriculum = CurriculumScheduler(written) if curriculum.enabled else None
        self.layer_drop = ProgressiveLayerDrop(layer_drop.theta, layer_drop.gamma) if layer_drop.enabled else None
        self._is_length = curriculum.curriculum_type == "seqlen"
        self._num_steps = num_steps

    def arguments(self) -> dict[str, Any]:
        """Move to the step that has begun, and return what its forwards are given."""
        arguments: dict[str, Any] = {}
        if self.layer_drop is not None:
            self.layer_drop.update_state(self._num_steps())
            arguments.update(self.layer_drop.get_state())
        if self.curriculum is not None:
            self.curriculum.set_current_difficulty(self.curriculum.get_difficulty(self._num_steps() + 1))
            if self._is_length:
                arguments["curriculum_seqlen"] = self.curriculum.get_current_difficulty()
        return arguments
