"""A step is skipped although no gradient has overflowed."""

from dataclasses import replace

from deepspeed.precision.policy import Precision

CONFIG = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 8}}
FIRST = ("skipped step", "overflow")


def plant(patches):
    verdict = Precision.verdict
    steps = []

    def skipping(self, norm):
        steps.append(norm)
        return replace(verdict(self, norm), applies=len(steps) != 2)

    patches.setattr(Precision, "verdict", skipping)
