"""The update is made by gradients that are not clipped."""

from dataclasses import replace

from deepspeed.precision.policy import Precision

CONFIG = {
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
}
FIRST = ("weight", "embed.weight")


def plant(patches):
    verdict = Precision.verdict
    patches.setattr(Precision, "verdict", lambda self, norm: replace(verdict(self, norm), grad_scale=1.0))
