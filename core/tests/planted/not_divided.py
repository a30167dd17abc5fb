"""Gradients are summed over the ranks and not divided by their number."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("gradient", "head.bias")


def plant(patches):
    patches.setattr(ZeroStage, "begin_backward", lambda self, average, world_size: 1.0)
