"""Two ranks get each other's shard of the sums of one bucket."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("gradient", "layers.1.up.weight")


def plant(patches):
    reduce = ZeroStage.reduce

    def swapped(self, unit, wire_N):
        if unit.index == 2:
            wire_N.copy_(wire_N.roll(unit.layout.shard_numel))
        return reduce(self, unit, wire_N)

    patches.setattr(ZeroStage, "reduce", swapped)
