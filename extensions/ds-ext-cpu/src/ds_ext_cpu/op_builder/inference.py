"""Builder of transformer kernels: norms, gelu and rotary embedding."""

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_path


class InferenceBuilder(CPUOpBuilder):
    """`torch.ops.ds_cpu.{layer_norm, rms_norm, ..._residual, gelu, bias_gelu, rotary}`."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"
    NAME = "transformer_inference"

    def sources(self) -> list[str]:
        return [cpu_kernel_path("transformer_inference/transformer_inference.cpp")]

    def cxx_args(self) -> list[str]:
        # loops use a fused multiply-add only where they say so; otherwise all instruction sets give the same bits
        return [*super().cxx_args(), "-ffp-contract=off"]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        norms = ("layer_norm", "layer_norm_residual", "rms_norm", "rms_norm_residual")
        register_fakes("ds_cpu", *norms, "gelu", "bias_gelu", "rotary")
