"""Builder of the Adagrad kernel."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class CPUAdagradBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.adagrad_step_`, for `DeepSpeedCPUAdagrad`."""

    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    NAME = "cpu_adagrad"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("adagrad/cpu_adagrad.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cpu", "adagrad_step_")
