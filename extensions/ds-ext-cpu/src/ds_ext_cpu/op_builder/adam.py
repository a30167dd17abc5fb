"""Builders of the Adam kernel: one library under the name of the host op and of the accelerator op."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class CPUAdamBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.adam_step_`, for `DeepSpeedCPUAdam`."""

    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    NAME = "cpu_adam"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("adam/cpu_adam.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cpu", "adam_step_")


class FusedAdamBuilder(CPUAdamBuilder):
    """The same operator, for `FusedAdam` when the accelerator is the CPU."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"
