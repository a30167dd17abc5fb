"""Builders of the LAMB kernel: one library under the name of the host op and of the accelerator op."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class CPULambBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.lamb_step_`, for tensors in host memory."""

    BUILD_VAR = "DS_BUILD_CPU_LAMB"
    NAME = "cpu_lamb"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("lamb/cpu_lamb.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cpu", "lamb_step_")


class FusedLambBuilder(CPULambBuilder):
    """The same operator, for `FusedLamb` when the accelerator is the CPU."""

    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    NAME = "fused_lamb"
