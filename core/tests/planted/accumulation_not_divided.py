"""A loss of a micro-batch is not divided by the number of micro-batches."""

from deepspeed.engine.training import Training

CONFIG = {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 2}
FIRST = ("gradient", "head.bias")


def plant(patches):
    backward = Training.backward

    def undivided(self, loss, gradient, *, is_divided, **others):
        return backward(self, loss, gradient, is_divided=True, **others)

    patches.setattr(Training, "backward", undivided)
