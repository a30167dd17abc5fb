"""Builder of the multi-tensor Lion kernel."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class FusedLionBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.lion_step_`, for `FusedLion`."""

    BUILD_VAR = "DS_BUILD_FUSED_LION"
    NAME = "fused_lion"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("lion/fused_lion.cu")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cuda", "lion_step_")
