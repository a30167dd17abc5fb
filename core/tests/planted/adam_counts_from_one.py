"""Adam's first step is corrected as if it were the second."""

from deepspeed.ops.adam import FusedAdam

CONFIG = {"zero_optimization": {"stage": 0}}
FIRST = ("weight", "embed.weight")


def plant(patches):
    create = FusedAdam.create_state

    def counted(self, param, group):
        state = create(self, param, group)
        state["step"] += 1
        return state

    patches.setattr(FusedAdam, "create_state", counted)
