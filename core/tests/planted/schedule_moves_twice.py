"""The learning rate schedule moves twice in each step."""

from deepspeed.engine.training import Training

CONFIG = {
    "zero_optimization": {"stage": 2},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
}
FIRST = ("learning rate", "group 0")


def plant(patches):
    move = Training._step_schedule

    def twice(self, lr_kwargs):
        move(self, lr_kwargs)
        move(self, lr_kwargs)

    patches.setattr(Training, "_step_schedule", twice)
