"""The table of documented ops and the class names of their builders, used by the registry and `op_builder`.

May import nothing: `deepspeed.ops.op_builder` reads it before torch is imported.
"""

from typing import NamedTuple


class Op(NamedTuple):
    """One documented op.

    Fields:
        builder: the class name of its builders.
        on_host: the op works in host memory for every device. Any other op takes the device's tensors; a host kernel
            is used for it only if the device is the host.
        operators: the functions that the front calls on the loaded op. A builder may provide more. If it lacks one of
            these, the front runs its torch reference.
        front: the public name, with the torch reference in or beside it; "" if this version has none.
        adapter: a module whose `adapt(loaded op)` adds these operators to an op with DeepSpeed's function, or is None.
    """

    builder: str
    on_host: bool = False
    operators: tuple[str, ...] = ()
    front: str = ""
    adapter: str = ""


# short name -> op: DeepSpeed's documented builders under the NAME of DeepSpeed's builder.
OPS: dict[str, Op] = {
    "async_io": Op("AsyncIOBuilder", on_host=True, operators=("aio_handle",)),
    "cpu_adagrad": Op(
        "CPUAdagradBuilder", on_host=True, operators=("adagrad_step_",), front="adagrad.DeepSpeedCPUAdagrad"
    ),
    "cpu_adam": Op("CPUAdamBuilder", on_host=True, operators=("adam_step_",), front="adam.DeepSpeedCPUAdam"),
    "cpu_lamb": Op("CPULambBuilder", on_host=True, operators=("lamb_step_",)),
    "cpu_lion": Op("CPULionBuilder", on_host=True, operators=("lion_step_",), front="lion.DeepSpeedCPULion"),
    "cutlass_ops": Op("InferenceCutlassBuilder"),
    "dc": Op("DeepCompileBuilder"),
    "deepspeed_ccl_comm": Op("CCLCommBuilder"),
    "deepspeed_shm_comm": Op("ShareMemCommBuilder", on_host=True),
    "evoformer_attn": Op("EvoformerAttnBuilder"),
    "fp_quantizer": Op("FPQuantizerBuilder"),
    "fused_adam": Op(
        "FusedAdamBuilder", operators=("adam_step_",), front="adam.FusedAdam", adapter="adam.multi_tensor"
    ),
    "fused_lamb": Op("FusedLambBuilder", operators=("lamb_step_",), front="lamb.FusedLamb"),
    "fused_lion": Op("FusedLionBuilder", operators=("lion_step_",), front="lion.FusedLion"),
    "gds": Op("GDSBuilder"),
    "inference_core_ops": Op(
        "InferenceCoreBuilder", operators=("linear", "packed_linear", "gated_activation"), front="transformer.linear"
    ),
    "quantizer": Op(
        "QuantizerBuilder",
        operators=("quantize_groups", "dequantize_groups", "dequantize_reduce", "fake_quantize_groups"),
        front="quantizer",
    ),
    "ragged_device_ops": Op("RaggedOpsBuilder", operators=("decode_attention",), front="transformer.decode_attention"),
    "ragged_ops": Op("RaggedUtilsBuilder"),
    "random_ltd": Op("RandomLTDBuilder", operators=("token_gather", "token_scatter_"), front="random_ltd"),
    "sparse_attn": Op("SparseAttnBuilder"),
    "spatial_inference": Op("SpatialInferenceBuilder"),
    "stochastic_transformer": Op("StochasticTransformerBuilder"),
    "transformer": Op("TransformerBuilder"),
    "transformer_inference": Op(
        "InferenceBuilder",
        operators=("layer_norm", "layer_norm_residual", "rms_norm", "rms_norm_residual", "gelu", "bias_gelu", "rotary"),
        front="transformer",
    ),
    "utils": Op("UtilsBuilder", on_host=True),
}
