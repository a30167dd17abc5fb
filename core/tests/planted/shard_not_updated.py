"""The update misses one shard of one rank."""

from deepspeed import comm
from deepspeed.zero.update import OptimizerUpdate

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("weight", "layers.1.down.weight")


def plant(patches):
    used = OptimizerUpdate._used_of

    def missing(self, batch, num_groups):
        groups = used(self, batch, num_groups)
        if comm.get_rank() == 0:
            groups[0] = [shard for shard in groups[0] if shard.index != 8]  # layers.1.down.weight
        return groups

    patches.setattr(OptimizerUpdate, "_used_of", missing)
