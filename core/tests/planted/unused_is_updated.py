"""A parameter that no rank used is updated, and decays."""

from deepspeed.zero.gradients import Gradients

CONFIG = {"zero_optimization": {"stage": 1}}
USES = ("unused",)
FIRST = ("gradient", "extra.bias")


def plant(patches):
    finish = Gradients._finish_collectives

    def marking(self):
        squares = finish(self)
        self.was_used[:] = [True] * len(self.was_used)
        return squares

    patches.setattr(Gradients, "_finish_collectives", marking)
