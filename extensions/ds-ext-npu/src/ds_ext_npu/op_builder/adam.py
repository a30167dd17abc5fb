"""The builder of Adam, which uses the vendor's fused operator."""

from typing import Any

from ds_ext_npu.op_builder.vendor_op_builder import VendorOpBuilder


class FusedAdamBuilder(VendorOpBuilder):
    """Provides `adam_step_` for `FusedAdam`, with `torch_npu.npu_apply_adam_w`."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"
    calls = ("npu_apply_adam_w",)

    def operators(self) -> Any:
        from ds_ext_npu.operators import adam

        return adam
