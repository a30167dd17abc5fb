"""Builder of generation kernels: linear layers with plain and quantized weights, the gate, and whole layers."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class InferenceCoreBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.{linear, packed_linear, packed_grouped_linear, gated_activation, decoder_layer}`."""

    BUILD_VAR = "DS_BUILD_INFERENCE_CORE_OPS"
    NAME = "inference_core_ops"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("inference_core/inference_core.cpp")]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes(
            "ds_cpu", "linear", "packed_linear", "packed_grouped_linear", "gated_activation", "decoder_layer"
        )
