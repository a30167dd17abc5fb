"""Two gradients of the same size are written to each other's place in the bucket, on one rank."""

from deepspeed import comm
from deepspeed.zero.gradient_reduction import GradientReduction

CONFIG = {"zero_optimization": {"stage": 1}}
FIRST = ("gradient", "layers.1.norm.bias")


def plant(patches):
    take = GradientReduction._take

    def swapping(self, index, places=None):
        named = {self._name_of(param): param for param in self._units[index].params}
        one, other = named.get("layers.1.norm.weight"), named.get("layers.1.norm.bias")
        if comm.get_rank() == 1 and one is not None and one.grad is not None and other.grad is not None:
            one.grad, other.grad = other.grad, one.grad
        take(self, index, places)

    patches.setattr(GradientReduction, "_take", swapping)
