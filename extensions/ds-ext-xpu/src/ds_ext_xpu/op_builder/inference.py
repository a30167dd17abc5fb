"""The builder of the transformer ops: norms, gelu and rotary embedding."""

from ds_ext_xpu.op_builder.sycl_op_builder import SYCLOpBuilder, sycl_kernel_path


class InferenceBuilder(SYCLOpBuilder):
    """Builds `torch.ops.ds_xpu.{layer_norm, rms_norm, ..._residual, gelu, bias_gelu, rotary}`."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"
    NAME = "transformer_inference"

    def sources(self) -> list[str]:
        return [sycl_kernel_path("transformer_inference/transformer_inference.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        norms = ("layer_norm", "layer_norm_residual", "rms_norm", "rms_norm_residual")
        register_fakes("ds_xpu", *norms, "gelu", "bias_gelu", "rotary")
