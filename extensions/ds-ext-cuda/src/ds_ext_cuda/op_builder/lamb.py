"""Builder of the multi-tensor LAMB kernels."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path
from ds_ext_cuda.op_builder.fakes import register_step_fake


class FusedLambBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.lamb_step_`, for `FusedLamb`."""

    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    NAME = "fused_lamb"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("lamb/fused_lamb.cu")]

    def register_fakes(self) -> None:
        register_step_fake("lamb_step_")
