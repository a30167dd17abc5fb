"""Builder of the multi-tensor Adam kernel."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path
from ds_ext_cuda.op_builder.fakes import register_step_fake


class FusedAdamBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.adam_step_`, for `FusedAdam`."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("adam/fused_adam.cu")]

    def register_fakes(self) -> None:
        register_step_fake("adam_step_")
