"""Builder of the multi-tensor Adam kernel."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class FusedAdamBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.adam_step_`, for `FusedAdam`."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("adam/fused_adam.cu")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cuda", "adam_step_")
