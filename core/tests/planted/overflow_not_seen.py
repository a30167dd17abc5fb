"""A step is made although gradients have overflowed."""

from deepspeed.precision.policy import Precision

CONFIG = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 30}}
FIRST = ("skipped step", "overflow")


def plant(patches):
    verdict = Precision.verdict

    def seeing(self, norm):
        self.checks_overflow = False
        made = verdict(self, norm)
        self.checks_overflow = True
        return made

    patches.setattr(Precision, "verdict", seeing)
