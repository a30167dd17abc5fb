"""The second copy of the weights (hpZ) is not dropped when they are updated."""

from deepspeed.zero.placement import SecondaryShard

CONFIG = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
NUM_RANKS = 4
FIRST = ("forward weight", "embed.weight")


def plant(patches):
    patches.setattr(SecondaryShard, "forget", lambda self: None)
