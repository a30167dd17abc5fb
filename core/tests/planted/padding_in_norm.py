"""The padding of a bucket is not zeroed, and the norm counts it."""

from deepspeed import comm
from deepspeed.zero.gradient_memory import GradientShards

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("norm", "whole gradient")


def plant(patches):
    add_up = GradientShards.add_up

    def padded(self, index, work, sum_S):
        work.wait()
        if comm.get_rank() == 1 and index == 0:
            sum_S[-1:] = 0.1
        return add_up(self, index, work, sum_S)

    patches.setattr(GradientShards, "add_up", padded)
