"""One bucket is all-reduced a second time."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 0}}
FIRST = ("gradient", "layers.1.up.weight")


def plant(patches):
    reduce = ZeroStage.reduce

    def twice(self, unit, wire_N):
        if unit.index == 2:
            reduce(self, unit, wire_N).wait()
        return reduce(self, unit, wire_N)

    patches.setattr(ZeroStage, "reduce", twice)
