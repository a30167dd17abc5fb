"""DeepSpeed's documented modules of features that are not here yet; names are below `deepspeed`.

docs/generate/old_addresses.py writes each of them as a file that takes its names from here.
"""

from collections.abc import Mapping

from deepspeed.compatibility.records import Module


def _absent(
    feature: str, classes: str = "", functions: str = "", errors: str = "", forwards: Mapping[str, str] | None = None
) -> Module:
    """A record from names with spaces between; `forwards` maps a module to the names it has."""
    return Module(
        feature,
        tuple(classes.split()),
        tuple(functions.split()),
        tuple(errors.split()),
        {name: f"{where}:{name}" for where, names in (forwards or {}).items() for name in names.split()},
    )


_SPARSITY_CONFIGS = (
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
    "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig"
)
MODULES = {
    "checkpoint.deepspeed_checkpoint": _absent("universal checkpoints", "DeepSpeedCheckpoint"),
    "checkpoint.universal_checkpoint": _absent(
        "universal checkpoints", functions="enable_universal_checkpoint load_hp_checkpoint_state"
    ),
    "compile": _absent("DeepCompile"),
    "compile.backend": _absent("DeepCompile", functions="make_backend register_compile_pass"),
    "model_implementations": _absent(
        "kernel injection",
        forwards={
            "model_implementations.transformers.ds_transformer": "DeepSpeedTransformerInference",
            "inference.config": "DeepSpeedInferenceConfig",
        },
    ),
    "model_implementations.transformers": _absent("kernel injection"),
    "model_implementations.transformers.ds_transformer": _absent("kernel injection", "DeepSpeedTransformerInference"),
    "module_inject": _absent(
        "kernel injection",
        "GroupQuantizer ReplaceWithTensorSlicing",
        "generic_injection module_inject",
        forwards={
            "module_inject.auto_tp": "AutoTP",
            "module_inject.layers": "EmbeddingLayer LinearAllreduce LinearLayer Normalize",
            "module_inject.policy": "DSPolicy TransformerPolicy",
            "module_inject.replace_module": "replace_transformer_layer revert_transformer_layer",
            "module_inject.replace_policy": "HFBertLayerPolicy HFGPT2LayerPolicy HFGPTJLayerPolicy BLOOMLayerPolicy",
        },
    ),
    "module_inject.auto_tp": _absent("AutoTP's classes", "AutoTP"),
    "module_inject.layers": _absent("AutoTP's classes", "EmbeddingLayer LinearAllreduce LinearLayer Normalize"),
    "module_inject.policy": _absent("kernel injection", "DSPolicy TransformerPolicy"),
    "module_inject.replace_module": _absent(
        "kernel injection", functions="replace_transformer_layer revert_transformer_layer replace_module"
    ),
    "module_inject.replace_policy": _absent(
        "kernel injection", "HFBertLayerPolicy HFGPT2LayerPolicy HFGPTJLayerPolicy BLOOMLayerPolicy"
    ),
    "nebula": _absent("Nebula"),
    "nebula.config": _absent("Nebula", "DeepSpeedNebulaConfig"),
    "ops.sparse_attention": _absent(
        "sparse attention", f"{_SPARSITY_CONFIGS} SparseSelfAttention BertSparseSelfAttention SparseAttentionUtils"
    ),
    "ops.transformer.transformer": _absent("transformer layer", "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    "ops.transformer.inference": _absent(
        "inference",
        forwards={"model_implementations.transformers.ds_transformer": "DeepSpeedTransformerInference"},
    ),
    "runtime.bf16_optimizer": _absent("optimizer classes", "BF16_Optimizer"),
    "runtime.fp16.fused_optimizer": _absent("optimizer classes", "FP16_Optimizer"),
    "runtime.fp16.unfused_optimizer": _absent("optimizer classes", "FP16_UnfusedOptimizer"),
    "runtime.checkpoint_engine": _absent("checkpoint engines"),
    "runtime.checkpoint_engine.checkpoint_engine": _absent("checkpoint engines", "CheckpointEngine"),
    "runtime.checkpoint_engine.torch_checkpoint_engine": _absent("checkpoint engines", "TorchCheckpointEngine"),
    "runtime.domino": _absent("Domino"),
    "runtime.domino.transformer": _absent("Domino", "DominoTransformerLayer DominoTransformer"),
    "runtime.sparse_tensor": _absent("sparse gradient tensors", "SparseTensor"),
    "runtime.state_dict_factory": _absent("inference", "MegatronSDLoader SDLoaderBase SDLoaderFactory"),
    "runtime.swap_tensor": _absent("nvme"),
    "runtime.swap_tensor.partitioned_optimizer_swapper": _absent("nvme", "PartitionedOptimizerSwapper"),
    "runtime.swap_tensor.partitioned_param_swapper": _absent(
        "nvme", "AsyncPartitionedParameterSwapper PartitionedParamStatus"
    ),
    "runtime.tensor_parallel": _absent(
        "AutoTP's classes", "TpTrainingManager", forwards={"config.parallel": "TensorParallelConfig"}
    ),
    "runtime.weight_quantizer": _absent("weight quantization", "WeightQuantization"),
    "runtime.zero.linear": _absent(
        "linear layers of stage 3", "LinearFunctionForZeroStage3 LinearModuleForZeroStage3", "zero3_linear_wrap"
    ),
    "sequence.fpdt_layer": _absent("FPDT", "FPDT_Attention FPDT_FFN FPDT_LogitsLoss FPDT_InputConstruct"),
}
