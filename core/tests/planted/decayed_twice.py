"""Weights decay twice in each step."""

from deepspeed.ops.adam import FusedAdam

CONFIG = {"zero_optimization": {"stage": 1}}
FIRST = ("weight", "embed.weight")


def plant(patches):
    numbers = FusedAdam.kernel_numbers
    update = FusedAdam.update_reference

    def twice(self, params, grads, group):
        update(self, params, grads, {**group, "weight_decay": 2 * group["weight_decay"]})

    def given_twice(self, group):
        found = numbers(self, group)
        return None if found is None else {**found, "weight_decay": 2 * found["weight_decay"]}

    patches.setattr(FusedAdam, "update_reference", twice)
    patches.setattr(FusedAdam, "kernel_numbers", given_twice)
