"""The hook of a parameter fires late: its gradient takes part in the next step."""

from deepspeed.zero.gradient_reduction import GradientReduction

CONFIG = {"zero_optimization": {"stage": 2}}
FIRST = ("gradient", "layers.1.down.weight")


def plant(patches):
    take = GradientReduction._take
    late = {}

    def taking(self, index, places=None):
        for param in self._units[index].params:
            if self._name_of(param) == "layers.1.down.weight" and param.grad is not None:
                param.grad, late[0] = late.get(0), param.grad
        take(self, index, places)

    patches.setattr(GradientReduction, "_take", taking)
