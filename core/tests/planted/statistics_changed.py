"""Statistics of a batch norm are put back to those of the start by an update."""

from deepspeed.engine.training import Training

CONFIG = {}
USES = ("batch norm",)
FIRST = ("buffer", "batch_norm.running_mean")


def plant(patches):
    step = Training.step

    def put_back(self, *arguments):
        self.sharding._module.batch_norm.running_mean.zero_()
        step(self, *arguments)

    patches.setattr(Training, "step", put_back)
