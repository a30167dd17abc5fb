"""Builder of the multi-tensor LAMB kernels."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class FusedLambBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.lamb_step_`, for `FusedLamb`."""

    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    NAME = "fused_lamb"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("lamb/fused_lamb.cu")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cuda", "lamb_step_")
