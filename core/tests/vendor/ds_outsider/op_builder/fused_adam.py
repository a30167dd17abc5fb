"""A Python module, as DeepSpeed's builders load one; its functions are those of DeepSpeed's fused_adam."""

from .builder import XYZOpBuilder, xyz_kernel_path


class FusedAdamBuilder(XYZOpBuilder):
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"

    def sources(self):
        return [xyz_kernel_path("csrc/adam/fused_adam.cpp"), ""]
