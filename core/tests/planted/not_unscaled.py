"""The update is made by gradients that are still multiplied by the loss scale."""

from dataclasses import replace

from deepspeed.precision.policy import Precision

CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    "fp16": {"enabled": True, "initial_scale_power": 4},
}
FIRST = ("weight", "embed.weight")


def plant(patches):
    verdict = Precision.verdict
    patches.setattr(Precision, "verdict", lambda self, norm: replace(verdict(self, norm), grad_scale=1.0))
