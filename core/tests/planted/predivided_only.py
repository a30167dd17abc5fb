"""The part of the division that is left after a sum of pre-divided gradients is forgotten."""

from deepspeed.zero.gradients import Gradients

CONFIG = {"zero_optimization": {"stage": 0}, "gradient_predivide_factor": 1.5}
FIRST = ("gradient", "head.bias")


def plant(patches):
    connect = Gradients.connect

    def forgetting(self, module, rows):
        self.postsum_factor = 1.0
        connect(self, module, rows)

    patches.setattr(Gradients, "connect", forgetting)
