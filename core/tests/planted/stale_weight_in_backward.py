"""The backward finds another weight than the forward."""

from deepspeed.zero.backward_window import is_in_backward
from deepspeed.zero.param_unit import ParamUnit

CONFIG = {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0}}
FIRST = ("gradient", "layers.1.norm.bias")


def plant(patches):
    finish = ParamUnit.finish

    def stale(self):
        finish(self)
        if "layers.1.up.weight" in self.names and is_in_backward():
            self._views[self.names.index("layers.1.up.weight")].mul_(0.9)

    patches.setattr(ParamUnit, "finish", stale)
