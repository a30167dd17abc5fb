"""Gradients of experts are summed over all ranks, which hold other experts."""

from deepspeed.comm import group_backend
from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 0}}
USES = ("moe",)
FIRST = ("gradient", "experts.moe.deepspeed_moe.experts.deepspeed_experts.0.bias")


def plant(patches):
    reduce = ZeroStage.reduce

    def over_all(self, unit, wire_N):
        return group_backend().all_reduce(wire_N) if unit.ranks.num_parts > 1 else reduce(self, unit, wire_N)

    patches.setattr(ZeroStage, "reduce", over_all)
