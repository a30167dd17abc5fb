"""The builder of the quantizer ops: quantization by group, fake quantization and dequantization."""

from ds_ext_xpu.op_builder.sycl_op_builder import SYCLOpBuilder, sycl_kernel_path


class QuantizerBuilder(SYCLOpBuilder):
    """Builds `torch.ops.ds_xpu.{quantize_groups, fake_quantize_groups, dequantize_groups, dequantize_reduce}`."""

    BUILD_VAR = "DS_BUILD_QUANTIZER"
    NAME = "quantizer"

    def sources(self) -> list[str]:
        return [sycl_kernel_path("quantizer/quantizer.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        names = ("quantize_groups", "fake_quantize_groups", "dequantize_groups", "dequantize_reduce")
        register_fakes("ds_xpu", *names)
