"""Builder of transformer kernels: norms, gelu, rotary embedding, masked softmax, fused additions."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class InferenceBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.{layer_norm, rms_norm, ..._residual, gelu, bias_gelu, rotary}`, which the core's ops call.

    The core does not call these two yet:

        bias_residual_add(x, bias, residual)    x + bias + residual, added in fp32 and rounded once; bias may be None
        masked_softmax(x, mask, scale)          softmax(scale * x + mask) over the last dimension of x, of up to 4
                                                dimensions; mask may be None, and broadcasts dimensions of size 1
    """

    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"
    NAME = "transformer_inference"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("transformer_inference/transformer_inference.cu")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import like_first, register_fakes

        norms = ("layer_norm", "layer_norm_residual", "rms_norm", "rms_norm_residual")
        own = dict.fromkeys(("bias_residual_add", "masked_softmax"), like_first)
        register_fakes("ds_cuda", *norms, "gelu", "bias_gelu", "rotary", **own)
