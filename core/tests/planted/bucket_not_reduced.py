"""One bucket is launched and never sent, so that each rank goes on with its own gradients."""

from deepspeed.comm.backend import DONE
from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 0}}
FIRST = ("gradient", "layers.1.up.weight")


def plant(patches):
    reduce = ZeroStage.reduce

    def unsent(self, unit, wire_N):
        return DONE if unit.index == 2 else reduce(self, unit, wire_N)

    patches.setattr(ZeroStage, "reduce", unsent)
