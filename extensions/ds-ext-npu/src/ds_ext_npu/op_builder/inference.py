"""The builder of the transformer ops, which use the vendor's operators."""

from typing import Any

from ds_ext_npu.op_builder.vendor_op_builder import VendorOpBuilder


class InferenceBuilder(VendorOpBuilder):
    """Provides `torch.ops.ds_npu.{layer_norm, rms_norm, ..._residual, gelu, bias_gelu, rotary}`."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"
    NAME = "transformer_inference"
    op_namespace = "ds_npu"
    calls = ("npu_layer_norm_eval", "npu_rms_norm", "npu_add_rms_norm", "npu_gelu", "npu_rotary_mul")

    def operators(self) -> Any:
        from ds_ext_npu.operators.library import operators

        return operators()
