"""The norm leaves out the shards of one rank."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
FIRST = ("norm", "whole gradient")


def plant(patches):
    part = ZeroStage.part_for_norm

    def without(self, unit, reduced):
        return part(self, unit, reduced)[: 0 if unit.rank == 1 else None]

    patches.setattr(ZeroStage, "part_for_norm", without)
