"""A rank writes to half of a bucket before its reduction is over."""

from deepspeed import comm
from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("gradient", "layers.1.up.weight")


def plant(patches):
    reduce = ZeroStage.reduce

    def overwritten(self, unit, wire_N):
        if unit.index == 2 and comm.get_rank() == 1:
            wire_N[wire_N.numel() // 2 :].zero_()
        return reduce(self, unit, wire_N)

    patches.setattr(ZeroStage, "reduce", overwritten)
