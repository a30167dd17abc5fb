"""The step is made one micro-batch early."""

from deepspeed.engine.training import Accumulation

CONFIG = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 3}
FIRST = ("loss", "micro-batches")


def plant(patches):
    patches.setattr(Accumulation, "is_boundary", lambda self: self._since_step + 2 >= self.num_steps)
