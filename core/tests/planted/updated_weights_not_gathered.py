"""After the update one unit is not gathered, and each rank goes on with its own part."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("forward weight", "layers.0.up.bias")


def plant(patches):
    gather = ZeroStage.gather_weights
    patches.setattr(ZeroStage, "gather_weights", lambda self, unit: None if unit.index == 2 else gather(self, unit))
