"""Gradients are divided by one rank too many."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 1}}
FIRST = ("gradient", "head.bias")


def plant(patches):
    patches.setattr(ZeroStage, "begin_backward", lambda self, average, world_size: 1.0 / (average + 1))
