"""Every rank counts the whole gradient in the norm, which all of them have."""

from deepspeed.zero.stages import ZeroStage

CONFIG = {"zero_optimization": {"stage": 0}}
FIRST = ("norm", "whole gradient")


def plant(patches):
    patches.setattr(ZeroStage, "part_for_norm", lambda self, unit, reduced: reduced)
