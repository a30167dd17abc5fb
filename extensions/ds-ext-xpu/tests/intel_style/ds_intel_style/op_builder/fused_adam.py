from .builder import SYCLOpBuilder, sycl_kernel_include, sycl_kernel_path


class FusedAdamBuilder(SYCLOpBuilder):
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"ds_intel_style.ops.adam.{self.NAME}_op"

    def sources(self):
        return [sycl_kernel_path("csrc/adam/fused_adam.cpp"), ""]

    def include_paths(self):
        return [sycl_kernel_include("csrc/includes"), ""]
