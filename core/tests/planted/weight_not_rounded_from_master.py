"""The update of one unit does not reach the model's weights."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
FIRST = ("forward weight", "layers.0.up.bias")


def plant(patches):
    gather = ZeroStage.gather_weights
    before = {}

    def forgetting(self, unit):
        if unit.index == 2:
            unit.flat_N.copy_(before.setdefault(0, unit.flat_N.clone()))
        return gather(self, unit)

    patches.setattr(ZeroStage, "gather_weights", forgetting)
