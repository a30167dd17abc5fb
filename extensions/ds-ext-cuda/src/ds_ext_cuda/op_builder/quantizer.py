"""Builder of the quantizer: quantization by group, fake quantization, and dequantization."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class QuantizerBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.{quantize_groups, fake_quantize_groups, dequantize_groups, dequantize_reduce}`.

    Also `swizzled_quantize_groups(x, num_groups, num_bits, symmetric, num_nodes, devices_per_node)`, for gradients in
    two all-to-alls: the operator writes the groups in the order (device, node, rest) instead of (node, device, rest).
    """

    BUILD_VAR = "DS_BUILD_QUANTIZER"
    NAME = "quantizer"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("quantizer/quantizer.cu")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import quantized, register_fakes

        names = ("quantize_groups", "fake_quantize_groups", "dequantize_groups", "dequantize_reduce")
        register_fakes("ds_cuda", *names, swizzled_quantize_groups=quantized)
