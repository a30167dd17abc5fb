"""Builder of the kernel for attention over a KV cache."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class RaggedOpsBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.decode_attention`."""

    BUILD_VAR = "DS_BUILD_RAGGED_DEVICE_OPS"
    NAME = "ragged_device_ops"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("attention/decode_attention.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cpu", "decode_attention")
