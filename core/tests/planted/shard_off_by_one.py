"""The last rank reads its shard of the sums one element too early."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 1}}
FIRST = ("gradient", "layers.1.up.weight")


def plant(patches):
    result = ZeroStage.result

    def shifted(self, unit):
        start, stop = result(self, unit)
        shift = int(unit.index == 2 and unit.rank == unit.ranks.world_size - 1)
        return start - shift, stop - shift

    patches.setattr(ZeroStage, "result", shifted)
