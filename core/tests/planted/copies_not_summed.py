"""Gradients are not summed over the copies of the weights (MiCS)."""

from deepspeed.zero.gradient_reduction import ReplicaSum

CONFIG = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
NUM_RANKS = 4
FIRST = ("gradient", "head.bias")


def plant(patches):
    patches.setattr(ReplicaSum, "add_up", lambda self, units: None)
