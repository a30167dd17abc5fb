"""Gradients of experts are divided by the ranks that hold the same experts."""

from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gradient_reduction import GradientReduction

CONFIG = {"zero_optimization": {"stage": 1}}
USES = ("moe",)
FIRST = ("gradient", "experts.moe.deepspeed_moe.experts.deepspeed_experts.0.bias")


def plant(patches):
    begin = Bucket.begin_backward
    begin_all = GradientReduction.begin

    def beginning(self, *, factor, **others):
        begin_all(self, factor=factor, **others)
        for unit, bucket in zip(self._units, map(self._by_unit.get, range(len(self._units))), strict=True):
            if unit.ranks.num_parts > 1:
                begin(bucket, factor * unit.ranks.num_parts)

    patches.setattr(GradientReduction, "begin", beginning)
