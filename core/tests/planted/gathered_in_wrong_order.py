"""Shards of a gathered unit lie in another order on one rank."""

from deepspeed.zero.param_unit import ParamUnit

CONFIG = {"zero_optimization": {"stage": 3}}
FIRST = ("forward weight", "layers.1.norm.weight")


def plant(patches):
    finish = ParamUnit.finish

    def turned(self):
        finish(self)
        if "layers.1.up.weight" in self.names and self.ranks.rank == 1:
            self._full_N.copy_(self._full_N.roll(self.layout.shard_numel))

    patches.setattr(ParamUnit, "finish", turned)
