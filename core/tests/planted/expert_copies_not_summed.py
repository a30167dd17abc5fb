"""Gradients of experts are not summed over the ranks that hold the same ones."""

from deepspeed.comm.backend import DONE
from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 0}}
USES = ("moe",)
NUM_RANKS = 4
FIRST = ("gradient", "experts.moe.deepspeed_moe.experts.deepspeed_experts.0.bias")


def plant(patches):
    reduce = ZeroStage.reduce

    def unsent(self, unit, wire_N):
        return DONE if unit.ranks.num_parts > 1 else reduce(self, unit, wire_N)

    patches.setattr(ZeroStage, "reduce", unsent)
