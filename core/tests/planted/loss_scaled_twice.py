"""The loss is multiplied by the loss scale twice."""

from deepspeed.precision.policy import LossScaler

CONFIG = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 4}}
FIRST = ("gradient", "head.bias")


def plant(patches):
    scale = LossScaler.scale
    patches.setattr(LossScaler, "scale", lambda self, loss: scale(self, scale(self, loss)))
