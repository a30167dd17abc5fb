"""The op in host memory: built by the core, from a source that the pair of functions names."""

from deepspeed.ops.op_builder.builder import OpBuilder

from .builder import sycl_kernel_include, sycl_kernel_path


class CPUAdamBuilder(OpBuilder):
    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    NAME = "cpu_adam"
    op_namespace = "ds_intel_style_host"
    min_torch = "2.10"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"ds_intel_style.ops.adam.{self.NAME}_op"

    def sources(self):
        return [sycl_kernel_path("csrc/adam/cpu_adam.cpp")]

    def include_paths(self):
        return [sycl_kernel_include("csrc/includes")]
