"""`StepSchedules`: what the number of the step gives to a forward, a length that grows or a share of layers that falls.

`CurriculumScheduler` is the section `curriculum_learning`, `ProgressiveLayerDrop` the section `progressive_layer_drop`,
both under DeepSpeed's names, which later versions of DeepSpeed removed. The model's own forward takes the arguments and
does the rest. Imported only where the configuration asks for one.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.config.training import CurriculumConfig, ProgressiveLayerDropConfig
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.log import warn_once

if TYPE_CHECKING:
    from deepspeed.compression.scheduler import compression_scheduler
    from deepspeed.data.random_ltd import RandomLTDScheduler

__all__ = ["ProgressiveLayerDrop", "StepSchedules"]


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
    """Gives each forward that trains its arguments, and moves compression to its step. Both follow from the number of
    steps alone, so that a run that goes on from a checkpoint goes on with them.

    Args:
        curriculum: the section; off where it is not enabled.
        layer_drop: the section; off where it is not enabled.
        random_ltd: says how many tokens layers keep; None: all.
        num_steps: returns the steps so far.
        compression: moves the layers of the model to a step; None: none compresses itself.
    """

    def __init__(
        self,
        curriculum: CurriculumConfig,
        layer_drop: ProgressiveLayerDropConfig,
        num_steps: Callable[[], int],
        random_ltd: "RandomLTDScheduler | None" = None,
        compression: "compression_scheduler | None" = None,
    ) -> None:
        # only what is written: nobody means the defaults of a length
        written = curriculum.model_dump(exclude_unset=True)
        self.curriculum = CurriculumScheduler(written) if curriculum.enabled else None
        self.layer_drop = ProgressiveLayerDrop(layer_drop.theta, layer_drop.gamma) if layer_drop.enabled else None
        self._is_length = curriculum.curriculum_type == "seqlen"
        self._num_steps = num_steps
        self.random_ltd = random_ltd
        self.compression = compression

    def arguments(self, *, trains: bool = True) -> dict[str, Any]:
        """Move to the step that has begun, and return what its forwards are given; one that does not train, nothing."""
        if self.compression is not None:
            self.compression.check_all_modules()
        if not trains:
            return {}
        arguments: dict[str, Any] = {}
        if self.layer_drop is not None:
            self.layer_drop.update_state(self._num_steps())
            arguments.update(self.layer_drop.get_state())
        if self.curriculum is not None:
            self.curriculum.set_current_difficulty(self.curriculum.get_difficulty(self._num_steps() + 1))
            if self._is_length:
                arguments["curriculum_seqlen"] = self.curriculum.get_current_difficulty()
        if self.random_ltd is not None:
            if not self.random_ltd.has_layers:
                warn_once(
                    "data_efficiency.data_routing.random_ltd.enabled: found true, but no layer drops tokens; call "
                    "convert_to_random_ltd with what initialize returned and the class of the layers"
                )
            self.random_ltd.update_seq(self._num_steps())
        return arguments
