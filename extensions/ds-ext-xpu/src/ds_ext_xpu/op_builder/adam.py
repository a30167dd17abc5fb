"""The builder of the Adam kernel."""

from ds_ext_xpu.op_builder.sycl_op_builder import SYCLOpBuilder, sycl_kernel_path


class FusedAdamBuilder(SYCLOpBuilder):
    """Builds `torch.ops.ds_xpu.adam_step_`, for `FusedAdam`."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"

    def sources(self) -> list[str]:
        return [sycl_kernel_path("adam/fused_adam.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_xpu", "adam_step_")
