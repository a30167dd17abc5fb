"""What the vendor answers for an op that it does not have."""

from .builder import SYCLOpBuilder


class NotImplementedBuilder(SYCLOpBuilder):
    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"
    NAME = "deepspeed_not_implemented"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"ds_intel_style.ops.{self.NAME}_op"

    def sources(self):
        return []

    def load(self, verbose=True):
        raise ValueError("This op had not been implemented on XPU backend.")
