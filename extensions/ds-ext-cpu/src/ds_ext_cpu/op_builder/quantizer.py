"""Builder of the quantizer: quantization by group, fake quantization, and dequantization."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class QuantizerBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.{quantize_groups, fake_quantize_groups, dequantize_groups, dequantize_reduce}`."""

    BUILD_VAR = "DS_BUILD_QUANTIZER"
    NAME = "quantizer"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("quantizer/quantizer.cpp")]

    def cxx_args(self) -> list[str]:
        # every instruction set and the torch reference give the same bits
        return [*super().cxx_args(), "-ffp-contract=off"]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        names = ("quantize_groups", "fake_quantize_groups", "dequantize_groups", "dequantize_reduce")
        register_fakes("ds_cpu", *names)
