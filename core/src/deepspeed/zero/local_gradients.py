"""`LocalGradients`: stage 0 for an optimizer whose ranks average more than gradients in its step.

Such an optimizer (`deepspeed.optim.one_bit`) says before each backward whether the step needs this rank's own
gradients. If so, buckets are filled as ever, and no reduction is sent.

[Note: the norm of own gradients] Ranks must agree on the norm, which says whether a step is skipped and how much is
clipped; of gradients that differ it is the root of the mean of their squared norms. It is no less than the norm of the
average, and inf or nan where some rank has that.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm.backend import Work
from deepspeed.comm.work import DONE
from deepspeed.errors import ConfigError
from deepspeed.optim.one_bit import OneBitOptimizer
from deepspeed.optim.traits import unwrapped
from deepspeed.parallel.mesh import Mesh
from deepspeed.zero.placement import exact_norm
from deepspeed.zero.stages import ZeroStage
from deepspeed.zero.unit import Unit
from deepspeed.zero.unit_groups import UnitGroups
from deepspeed.zero.units import Units


@dataclass(frozen=True)
class LocalGradients(ZeroStage):
    """Stage 0 whose gradients are summed over the ranks only in the steps for which `optimizer` wants that."""

    optimizer: OneBitOptimizer = field(kw_only=True)

    @property
    def shows_gradients(self) -> bool:
        """False: one kind of step would show averages and the other none."""
        return False

    def begin_backward(self, average: float, world_size: int) -> float:
        self.optimizer.begin_phase()
        return world_size / average if self.optimizer.keeps_gradients else super().begin_backward(average, world_size)

    def contributed(self, unit: Unit) -> tuple[int, int]:
        return self.result(unit) if self.optimizer.keeps_gradients else super().contributed(unit)

    def reduce(self, unit: Unit, wire_N: Tensor) -> Work:
        return DONE if self.optimizer.keeps_gradients else super().reduce(unit, wire_N)

    def part_for_norm(self, unit: Unit, reduced: Tensor) -> Tensor:
        if not self.optimizer.keeps_gradients:
            return super().part_for_norm(unit, reduced)
        own = exact_norm(unit.ranks.counted(reduced)) / math.sqrt(unit.ranks.world_size)
        return own.reshape(1)  # [Note: the norm of own gradients]

    def shown_gradient(self, gradient: Tensor) -> Tensor:
        ranks = self.optimizer.ranks
        if not self.optimizer.keeps_gradients or ranks is None:
            return gradient
        mean_N = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        ranks.all_reduce(mean_N, tag="gradient").wait()
        return mean_N.div_(ranks.world_size).view(gradient.shape)

    def finish_update(self) -> Collection[Tensor]:
        return self.optimizer.finish_update()

    def rounding(self, units: Units) -> dict[str, Any] | None:
        found = {name: self.optimizer.rounding.get(master) for name, master in _masters(units)}
        return {name: [each.worker, each.server] for name, each in found.items() if each is not None} or None

    def restore_rounding(self, units: Units, saved: Mapping[str, Any] | None) -> None:
        self.optimizer.restore_rounding({master: (saved or {}).get(name) for name, master in _masters(units)})


def stage_of(optimizer: Optimizer, stage: int, mesh: Mesh, units: UnitGroups) -> LocalGradients:
    """Return the stage for an optimizer that averages by itself, which joins the ranks.

    Raises:
        ConfigError: parameters or states are divided among ranks, where no rank has what the others average.
    """
    optimizer = unwrapped(optimizer)
    assert isinstance(optimizer, OneBitOptimizer)
    _refuse(optimizer, stage, mesh, units)
    optimizer.join(units.dense.reduce_group)
    return LocalGradients(0, optimizer=optimizer)


def _masters(units: Units) -> list[tuple[str, Tensor]]:
    """The names of the parameters, with what the optimizer has of each."""
    names = {id(param): name for name, param in units.named_parameters}
    return [(names[id(units.params[shard.index])], shard.master) for unit in units for shard in unit.shards]


def _refuse(optimizer: Optimizer, stage: int, mesh: Mesh, units: UnitGroups) -> None:
    name = type(optimizer).__name__
    if stage > 0:
        raise ConfigError(
            f"zero_optimization.stage: found {stage} with {name}, whose ranks average the momentum of whole "
            "parameters, and ZeRO divides it among them; set stage to 0, or use AdamW"
        )
    if mesh.size("tp") > 1:
        raise ConfigError(
            f"optimizer: found {name} with {mesh.size('tp')} tensor-parallel ranks, whose gradients have another norm "
            "on each; use AdamW, or no tensor parallelism"
        )
    if units.divides_experts:
        raise ConfigError(
            f"optimizer: found {name} for a model whose experts are divided over ranks, which then have no momentum to "
            "average with all others; use AdamW, or an ep_size of 1"
        )
