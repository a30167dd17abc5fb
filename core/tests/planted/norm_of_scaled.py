"""The norm that is clipped by is that of the gradients times the loss scale."""

from deepspeed.precision.policy import Precision

CONFIG = {
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "initial_scale_power": 8},
}
FIRST = ("norm", "whole gradient")


def plant(patches):
    verdict = Precision.verdict
    patches.setattr(Precision, "verdict", lambda self, norm: verdict(self, norm * self.loss_scaler.loss_scale))
