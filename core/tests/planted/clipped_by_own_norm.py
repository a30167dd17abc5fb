"""Each rank clips by the norm of its own shards instead of the norm of all."""

from dataclasses import replace

from deepspeed import comm
from deepspeed.precision.policy import Precision

CONFIG = {
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
}
FIRST = ("weight", "layers.0.norm.weight")


def plant(patches):
    verdict = Precision.verdict

    def own(self, norm):
        made = verdict(self, norm)
        return replace(made, grad_scale=made.grad_scale * (1.0 + 0.1 * comm.get_rank()))

    patches.setattr(Precision, "verdict", own)
