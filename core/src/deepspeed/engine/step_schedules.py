"""`StepSchedules`: values of a forward that depend on the step number: a growing length, a falling share of layers.

`CurriculumScheduler` is the section `curriculum_learning`, `ProgressiveLayerDrop` the section `progressive_layer_drop`.
Both have DeepSpeed's names; later versions of DeepSpeed removed them. The model's own forward takes the arguments and
does the rest. `create_step_schedules` and `create_curriculum` create what the configuration asks for.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values
from deepspeed.config.compression import CompressionConfig, asks_for_steps
from deepspeed.config.training import (
    CurriculumConfig,
    DataEfficiencyConfig,
    ProgressiveLayerDropConfig,
    RandomLTDConfig,
)
from deepspeed.data.curriculum import CurriculumScheduler, is_only_scheduler
from deepspeed.engine.observers import Progress
from deepspeed.engine.training import Training
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.parallel.mesh import Mesh
from deepspeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from deepspeed.compression.scheduler import BlockPruning, compression_scheduler
    from deepspeed.data.random_ltd import RandomLTDScheduler
    from deepspeed.data.sampler import Curriculum

__all__ = ["ProgressiveLayerDrop", "StepSchedules"]


class ProgressiveLayerDrop:
    """Computes the share of layers that a step keeps: theta(t) = (1 - theta) * exp(-gamma * t) + theta.

    Source: Zhang, He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping"
    (arXiv 2010.13369), section 4.

    Args:
        theta: the limit of the share, from 0 to 1.
        gamma: decay rate of the share, per step; 0: the share stays 1.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def update_state(self, global_step: int) -> None:
        """Set the share for the step after `global_step` steps."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta

    def get_theta(self) -> float:
        """Return the share of this step."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """Return the arguments of a forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}


class StepSchedules:
    """`StepSchedules` gives each forward that trains its arguments, and moves compression to its step. Both depend only
    on the number of steps, so a run that continues from a checkpoint continues with them.

    Args:
        curriculum: the section; off where it is not enabled.
        layer_drop: the section; off where it is not enabled.
        random_ltd: says how many tokens layers keep; None: all.
        num_steps: returns the steps so far.
        compression: moves the layers of the model to a step; None: no layer is compressed.
        takes_length: whether forwards get the sequence length as an argument; False for a pipeline.
    """

    def __init__(
        self,
        curriculum: CurriculumConfig,
        layer_drop: ProgressiveLayerDropConfig,
        num_steps: Callable[[], int],
        random_ltd: "RandomLTDScheduler | None" = None,
        compression: "compression_scheduler | None" = None,
        *,
        takes_length: bool = True,
    ) -> None:
        # only the keys that the user wrote: the default lengths suit no model
        written = curriculum.model_dump(exclude_unset=True)
        self.curriculum = CurriculumScheduler(written) if curriculum.enabled else None
        self.layer_drop = ProgressiveLayerDrop(layer_drop.theta, layer_drop.gamma) if layer_drop.enabled else None
        self._is_length = curriculum.curriculum_type == "seqlen"
        self._is_asked = takes_length and self._is_length  # whether a forward, or the script, gets the difficulty
        self._num_steps = num_steps
        self.random_ltd = random_ltd
        self.compression = compression

    def follow(self, training: Training) -> None:
        """Choose blocks of weights after each update, if a technique prunes by blocks."""
        if self.compression is not None and self.compression.blocks is not None:
            training.after_update.append(self.compression.blocks.step_ended)
        if self.curriculum is not None and not self._is_asked:
            training.after_update.append(self._warn_if_idle)

    def scheduler_of_curriculum(self) -> CurriculumScheduler | None:
        """Return the schedule for the script (`engine.curriculum_scheduler_legacy`), which asks for the difficulty."""
        self._is_asked = True
        return self.curriculum

    def _warn_if_idle(self, step: int, *, applied: bool, scale: float) -> None:
        """Warn once if a whole step has passed in which nothing asked for the difficulty."""
        if self.curriculum is None or self._is_asked or not is_only_scheduler(self.curriculum):
            return
        what = "a PipelineModule, whose layers take no curriculum_seqlen" if self._is_length else "no length"
        warn_once(
            f"curriculum_learning: found a curriculum of {what}, and nothing that asks for its difficulty, so that it "
            "changes nothing; let your data follow engine.curriculum_scheduler_legacy.get_current_difficulty()"
        )

    def arguments(self, *, trains: bool = True) -> dict[str, Any]:
        """Move to the current step, and return its forwards' arguments; none for a forward that does not train."""
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


def create_step_schedules(
    curriculum: CurriculumConfig,
    layer_drop: ProgressiveLayerDropConfig,
    data: DataEfficiencyConfig,
    compression: CompressionConfig,
    *,
    module: torch.nn.Module,
    mesh: Mesh,
    progress: Progress,
    train_batch_size: int,
    rounds_weights: bool,
) -> StepSchedules | None:
    """Create what the sections ask for; None where they ask for nothing.

    Args:
        progress: counts the steps.
        train_batch_size: samples per step, over all ranks.
        rounds_weights: as for `compression_scheduler`.

    Raises:
        ConfigError: the model or the mesh does not go with what a section asks for.
    """
    drops_tokens, compresses = data.asks_for_random_ltd(), asks_for_steps(compression)
    if not (curriculum.enabled or layer_drop.enabled or drops_tokens or compresses):
        return None
    if layer_drop.enabled and isinstance(module, PipelineModule):
        raise ConfigError(
            "progressive_layer_drop.enabled: found true with a PipelineModule, whose layers take no arguments of a "
            "step; switch it off, or drop layers in the layers' own forward"
        )
    if drops_tokens and isinstance(module, PipelineModule):
        raise ConfigError(
            "data_efficiency.data_routing.random_ltd.enabled: found true with a PipelineModule, whose layers "
            "convert_to_random_ltd does not reach; switch it off, or drop tokens in the layers' own forward"
        )
    random_ltd = _create_random_ltd(data.data_routing.random_ltd, mesh, train_batch_size) if drops_tokens else None
    scheduler = None
    if compresses:
        from deepspeed.compression.scheduler import compression_scheduler  # late: few runs ask for it

        scheduler = compression_scheduler(
            module, compression, lambda: progress.global_steps, rounds_weights=rounds_weights
        )
        if scheduler.blocks is not None:
            _connect_blocks(scheduler.blocks, module, mesh)
    return StepSchedules(
        curriculum,
        layer_drop,
        lambda: progress.global_steps,
        random_ltd,
        scheduler,
        takes_length=not isinstance(module, PipelineModule),
    )


def _create_random_ltd(section: RandomLTDConfig, mesh: Mesh, train_batch_size: int) -> "RandomLTDScheduler":
    for axis, ranks in (("tp", "tensor-parallel"), ("sp", "sequence-parallel")):
        if mesh.size(axis) > 1:
            raise ConfigError(
                f"data_efficiency.data_routing.random_ltd.enabled: found true with {mesh.size(axis)} {ranks} ranks, "
                "each of which would drop other tokens of one sample; switch it off, or use data-parallel ranks alone"
            )
    from deepspeed.data.random_ltd import RandomLTDScheduler  # late: few runs ask for it

    return RandomLTDScheduler(section, train_batch_size)


def _connect_blocks(blocks: "BlockPruning", module: torch.nn.Module, mesh: Mesh) -> None:
    """Average the scores over ranks that have gradients of their own."""
    if isinstance(module, PipelineModule):
        raise ConfigError(
            "compression_training.sparse_pruning.shared_parameters.method: found 'snip_momentum' with a "
            "PipelineModule, whose layers are not all on one rank to be compared; use 'topk' or 'l1'"
        )
    num_ranks = mesh.size("dp") * mesh.size("sp")
    if num_ranks > 1:
        backend = group_backend(mesh.gradient_group())

        def average(values: torch.Tensor) -> None:
            backend.all_reduce(values).wait()
            values /= num_ranks

        blocks.average = average


def create_curriculum(
    section: DataEfficiencyConfig, mesh: Mesh, *, micro_batch_size: int, num_steps: int
) -> "Curriculum | None":
    """Create the curriculum, which chooses samples by difficulty; None if the section does not ask for one.

    Args:
        micro_batch_size: samples of a micro-batch of one rank.
        num_steps: micro-batches of a step.
    """
    if not section.asks_for_curriculum():
        return None
    from deepspeed.data.sampler import Curriculum  # late: few runs ask for it

    stages = mesh.group("pp") if mesh.size("pp") > 1 else None
    return Curriculum(
        section,
        micro_batch_size=micro_batch_size,
        num_steps=num_steps,
        rank=mesh.rank("dp"),
        num_replicas=mesh.size("dp"),
        gather=None if stages is None else partial(all_gather_values, group=stages),
    )
