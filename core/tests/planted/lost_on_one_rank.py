"""One rank's hook drops the gradient of one parameter, whose sum is then that of the others."""

from deepspeed import comm
from deepspeed.zero.gradient_reduction import GradientReduction

CONFIG = {"zero_optimization": {"stage": 1}}
FIRST = ("gradient", "layers.1.up.weight")


def plant(patches):
    take = GradientReduction._take

    def losing(self, index, places=None):
        for param in self._units[index].params:
            if comm.get_rank() == 1 and self._name_of(param) == "layers.1.up.weight":
                param.grad = None
        take(self, index, places)

    patches.setattr(GradientReduction, "_take", losing)
