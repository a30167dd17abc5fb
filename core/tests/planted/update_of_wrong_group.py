"""Parameters of one group are updated by the learning rate of another."""

from deepspeed.zero.update import OptimizerUpdate

CONFIG = {"zero_optimization": {"stage": 1}}
USES = ("client optimizer",)
FIRST = ("weight", "layers.0.norm.weight")


def plant(patches):
    used = OptimizerUpdate._used_of

    def mixed(self, batch, num_groups):
        groups = used(self, batch, num_groups)
        return [groups[0] + groups[1], [], *groups[2:]]

    patches.setattr(OptimizerUpdate, "_used_of", mixed)
