"""The weights that the optimizer updates are rounded to those of the model after each update."""

from deepspeed.zero.update import OptimizerUpdate

CONFIG = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
FIRST = ("weight", "embed.weight")


def plant(patches):
    step = OptimizerUpdate.step

    def rounding(self, scale):
        for batch in step(self, scale):
            for shard in batch.shards:
                shard.master.copy_(shard.weight)
            yield batch

    patches.setattr(OptimizerUpdate, "step", rounding)
