"""A unit keeps the weights that it gathered before the last update."""

from deepspeed.zero.param_unit import ParamUnit

CONFIG = {"zero_optimization": {"stage": 3}}
FIRST = ("forward weight", "layers.1.norm.weight")


def plant(patches):
    finish, kept = ParamUnit.finish, {}

    def stale(self):
        finish(self)
        if "layers.1.up.weight" in self.names:
            self._full_N.copy_(kept.setdefault(0, self._full_N.clone()))

    patches.setattr(ParamUnit, "finish", stale)
