"""The sum of a micro-batch overwrites that of the micro-batches before it."""

from deepspeed.zero.gradient_memory import GradientShards

CONFIG = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
FIRST = ("gradient", "head.bias")


def plant(patches):
    add_up = GradientShards.add_up

    def overwriting(self, index, work, sum_S):
        self._summed.discard(index)
        return add_up(self, index, work, sum_S)

    patches.setattr(GradientShards, "add_up", overwriting)
