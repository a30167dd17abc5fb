"""Builders of the Lion kernel: one library under the name of the host op and of the accelerator op."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class CPULionBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.lion_step_`, for `DeepSpeedCPULion`."""

    BUILD_VAR = "DS_BUILD_CPU_LION"
    NAME = "cpu_lion"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("lion/cpu_lion.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cpu", "lion_step_")


class FusedLionBuilder(CPULionBuilder):
    """The same operator, for `FusedLion` when the accelerator is the CPU."""

    BUILD_VAR = "DS_BUILD_FUSED_LION"
    NAME = "fused_lion"
