"""The last element of a weight is left out of an update, as by a kernel that counts one too few."""

from deepspeed.zero.sharding import Sharding

CONFIG = {"zero_optimization": {"stage": 0}}
FIRST = ("weight", "layers.1.up.weight")


def plant(patches):
    update = Sharding.update

    def leaving_one_out(self, *arguments):
        last = self._module.layers[1].up.weight.detach().view(-1)[-1:]
        before = last.clone()
        update(self, *arguments)
        last.copy_(before)

    patches.setattr(Sharding, "update", leaving_one_out)
