"""Builder of generation kernels: linear layers with plain and quantized weights, and the gate."""

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class InferenceCoreBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.{linear, packed_linear, gated_activation}`, which the core's ops call."""

    BUILD_VAR = "DS_BUILD_INFERENCE_CORE_OPS"
    NAME = "inference_core_ops"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("inference_core/inference_core.cu")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_cuda", "linear", "packed_linear", "gated_activation")
