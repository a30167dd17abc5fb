"""The features and engine methods that are not here yet, with what to do instead.

`hasattr(engine, name)` is False for such a method; looking one up raises an `AttributeError` with the sentence. Methods
that only read a value are in `engine/accessors.py`.

`MODULES` has DeepSpeed's documented modules of such features; names are below `deepspeed`.
docs/generate/old_addresses.py writes each of them as a file that takes its names from here. May import nothing of the
project.

`upstream_names` gives the public names of DeepSpeed 0.19.6 and 0.19.8, `feature_of` the feature that each module
belongs to which is not here. `names.json` is read from the sdists by docs/generate/deepspeed_names.py. A module or a
name in it that this version lacks imports all the same, and refuses when it is used, with the sentence of its feature.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Feature:
    """A feature that is not here yet.

    Args:
        title: subject of the sentence "... is not in this version".
        instead: what to do without it, as an instruction.
    """

    title: str
    instead: str

    def explain(self, asked: str) -> str:
        """The message for a user of `asked`."""
        return f"{asked}: {self.title} is not in this version of ds-core; {self.instead}"


@dataclass(frozen=True)
class Module:
    """A documented module of a feature that is not here yet. It imports; its names refuse when they are used.

    Args:
        feature: key of FEATURES.
        classes: names that can be subclassed and given to isinstance.
        functions: names that raise when they are called.
        errors: exceptions, for `except` clauses.
        forwards: name -> "module:name" below `deepspeed`, for what another module has.
    """

    feature: str
    classes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    forwards: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Every name that can be imported from it, except its submodules."""
        return sorted({*self.classes, *self.functions, *self.errors, *self.forwards})


@dataclass(frozen=True)
class Default:
    """A key of the configuration whose default is not that of the pinned version, and why."""

    ours: object
    theirs: object
    reason: str


@dataclass(frozen=True)
class EngineMethod:
    """A documented method of the engine that is not here yet, and what to do instead of calling it."""

    name: str
    instead: str

    def explain(self) -> str:
        """The message for a user of the method."""
        return f"{self.name}: this method of DeepSpeed's engine is not in this version of ds-core; {self.instead}"


FEATURES = {
    "AutoTP's classes": Feature("a class for each part of AutoTP", "call deepspeed.tp_model_init(model, tp_size)"),
    "AutoEP's classes": Feature("a class for each part of AutoEP", 'set "expert_parallel": {"enabled": true}'),
    "AutoSP": Feature("AutoSP", "use deepspeed.sequence.layer.DistributedAttention or UlyssesSPAttentionHF"),
    "autotuning internals": Feature(
        "a part of DeepSpeed's autotuner", "run deepspeed --autotuning tune, see docs/howto/tune-a-run.md"
    ),
    "checkpoint engines": Feature(
        "another checkpoint engine",
        "save_checkpoint writes through engine.checkpointer.store, which a plugin can replace",
    ),
    "builders of DeepSpeed": Feature(
        "a builder of DeepSpeed's own kernels",
        "use deepspeed.ops.op_builder.OpBuilder, or the builders of an extension",
    ),
    "communication types": Feature(
        "a type of communication for each parameter", "gradients are reduced in communication_data_type"
    ),
    "communication internals": Feature(
        "a part of DeepSpeed's communication layer", "call deepspeed.comm or torch.distributed"
    ),
    "compressed collectives": Feature(
        "a class of DeepSpeed's compressed collectives",
        "use the optimizer OneBitAdam, or deepspeed.comm.compressed.average",
    ),
    "compression": Feature("this part of compression", "call init_compression, for layers that ranks do not divide"),
    "data efficiency": Feature(
        "a part of the data efficiency library", "use the names that docs/howto/choose-the-data.md has"
    ),
    "DeepCompile": Feature("DeepCompile", "call engine.compile(), which uses torch.compile"),
    "DualPipeV": Feature("the DualPipeV schedule", 'set "pipeline": {"schedule": "zero_bubble"}'),
    "Domino": Feature("Domino", "use data parallelism"),
    "eigenvalue": Feature(
        "a part of eigenvalue estimation", "use deepspeed.runtime.eigenvalue.Eigenvalue, or the section eigenvalue"
    ),
    "elasticity": Feature(
        "a part of DeepSpeed's elasticity", "use deepspeed.elasticity, or run deepspeed --elastic_training"
    ),
    "fp8 quantizer": Feature(
        "a kernel of the floating-point quantizer", "use deepspeed.ops.fp_quantizer: FP_Quantize and matmul_fp8"
    ),
    "inference": Feature("this part of inference", "use deepspeed.init_inference"),
    "inference internals": Feature(
        "a part of DeepSpeed's inference engines", "call deepspeed.init_inference, or a library made for serving"
    ),
    "internals": Feature(
        "this part of DeepSpeed's implementation", "use the names that docs/reference/compatibility.md lists"
    ),
    "kernels of DeepSpeed": Feature("a kernel of DeepSpeed's own", "use torch's operators, or deepspeed.ops"),
    "launcher internals": Feature("a part of DeepSpeed's launcher", "run the command deepspeed, see launcher.md"),
    "rollouts": Feature("generation between training steps by an engine of its own", "use deepspeed.init_inference"),
    "SuperOffload": Feature("SuperOffload", 'set "offload_optimizer": {"device": "cpu"}'),
    "ZenFlow": Feature("ZenFlow", 'set "offload_optimizer": {"device": "cpu"}'),
    "kernel injection": Feature(
        "a class that replaces layers",
        "call init_inference(model, replace_with_kernel_inject=True)",
    ),
    "LoRA": Feature("a part of deepspeed.linear", "use deepspeed.linear.OptimizedLinear"),
    "Nebula": Feature("the Nebula service", 'set "nebula": {"enabled": true}, which saves asynchronously to a folder'),
    "nvme": Feature(
        "the classes that swap tensors", 'set "offload_optimizer" or "offload_param" to {"device": "nvme", ...}'
    ),
    "optimizer classes": Feature(
        "one optimizer class per precision",
        "use deepspeed.runtime.base_optimizer.ZeROOptimizer, the class of all of them",
    ),
    "FPDT": Feature(
        "DeepSpeed's FPDT layer", "use deepspeed.sequence.blockwise.ChunkedAttention within DistributedAttention"
    ),
    "sparse attention": Feature("sparse attention", "use torch.nn.attention.flex_attention"),
    "linear layers of stage 3": Feature(
        "a linear layer for stage 3", "use torch.nn.Linear, of which no gathered weight is kept"
    ),
    "sparse gradient tensors": Feature(
        "a sparse tensor type of its own", "use torch.sparse_coo_tensor and torch.nn.Embedding(sparse=True)"
    ),
    "transformer layer": Feature("the fused transformer layer", "use torch.nn.TransformerEncoderLayer"),
    "universal checkpoints": Feature(
        "universal checkpoints", "load_checkpoint takes checkpoints of any number of ranks and any stage as they are"
    ),
    "weight quantization": Feature(
        "a class that quantizes weights",
        'call deepspeed.init_inference(model, dtype="int8"), or use deepspeed.inference.quantization',
    ),
}


_REDUCES = "backward and step reduce the gradients themselves; no_sync() postpones the reduction"
_SPARSE = 'gradients of torch.nn.Embedding(sparse=True) need "sparse_gradients": true and no call'
_COMPILE = "call engine.compile(), which uses torch.compile"

_INSTEAD = {
    "all_gather_scalar": "call deepspeed.comm.all_gather",
    "allreduce_and_copy": _REDUCES,
    "allreduce_and_scatter": _REDUCES,
    "allreduce_bucket": _REDUCES,
    "allreduce_gradients": _REDUCES,
    "allreduce_no_retain": _REDUCES,
    "buffered_allreduce_fallback": _REDUCES,
    "checkpoint_engine": "save_checkpoint writes through engine.checkpointer.store",
    "clip_fp32_gradients": 'set "gradient_clipping" in the configuration',
    "checkpoint_writer_enabled": "save_checkpoint writes through engine.checkpointer.store",
    "collect_python_gc": "call gc.collect(); Python's collector stays on",
    "compile_autosp": _COMPILE,
    "compile_autotp": _COMPILE,
    "compile_zero_optimization_stage": _COMPILE,
    "create_deepcompile_backend": _COMPILE,
    "eval_batch": "it belongs to the engine of a PipelineModule; call engine.eval() and the engine itself",
    "generate": "the model has none; give initialize a model of transformers that generates",
    "get_autosp_backend": _COMPILE,
    "get_autotp_backend": _COMPILE,
    "get_compile_time": _COMPILE,
    "get_deepcompile_backend": _COMPILE,
    "get_deepspeed_compile_backend": _COMPILE,
    "get_optimizer_configuration": "read engine.optimizer_name() and engine.optimizer_params()",
    "get_wall_clock_timers": "read engine.timers",
    "launch_compile_passes": _COMPILE,
    "load_moe_state_dict": "it belongs to mixture of experts; call load_checkpoint",
    "quantize_training": (
        "read the section quantize_training of the configuration, and engine.compression_scheduler for "
        "compression_training"
    ),
    "register_compile_pass": _COMPILE,
    "sparse_all_gather": _SPARSE,
    "sparse_allreduce": _SPARSE,
    "sparse_allreduce_bucket": _SPARSE,
    "sparse_allreduce_no_retain": _SPARSE,
    "train_batch": "it belongs to the engine of a PipelineModule; call the engine, backward and step",
    "uses_parallelization_pass_only": _COMPILE,
    "update_optimizer_step": "load_checkpoint restores the step counts of the optimizer",
}

ENGINE_METHODS = {name: EngineMethod(name, instead) for name, instead in _INSTEAD.items()}


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


# Beginning of a module below `deepspeed` -> its feature; the longest that fits counts.
_FEATURE_OF = {
    "": "internals",
    "autotuning": "autotuning internals",
    "checkpoint": "universal checkpoints",
    "comm": "communication internals",
    "compile": "DeepCompile",
    "compression": "compression",
    "datastates": "checkpoint engines",
    "elasticity": "elasticity",
    "inference": "inference internals",
    "io": "checkpoint engines",
    "launcher": "launcher internals",
    "linear": "LoRA",
    "model_implementations": "kernel injection",
    "module_inject": "kernel injection",
    "module_inject.auto_ep": "AutoEP's classes",
    "module_inject.auto_tp": "AutoTP's classes",
    "module_inject.autotp": "AutoTP's classes",
    "module_inject.layers": "AutoTP's classes",
    "module_inject.tp_": "AutoTP's classes",
    "moe.ep_": "AutoEP's classes",
    "moe.fused_expert": "AutoEP's classes",
    "nebula": "Nebula",
    "nvme": "nvme",
    "ops.deepspeed4science": "kernels of DeepSpeed",
    "ops.fp_quantizer": "fp8 quantizer",
    "ops.op_builder": "builders of DeepSpeed",
    "ops.random_ltd": "data efficiency",
    "ops.sparse_attention": "sparse attention",
    "ops.transformer": "transformer layer",
    "ops.triton_ops": "kernels of DeepSpeed",
    "profiling": "internals",
    "runtime.checkpoint_engine": "checkpoint engines",
    "runtime.comm": "compressed collectives",
    "runtime.compression": "compressed collectives",
    "runtime.data_pipeline": "data efficiency",
    "runtime.domino": "Domino",
    "runtime.eigenvalue": "eigenvalue",
    "runtime.model_checkpointing": "checkpoint engines",
    "runtime.pipe.dualpipev": "DualPipeV",
    "runtime.progressive_layer_drop": "internals",
    "runtime.quantize": "weight quantization",
    "runtime.rollout": "rollouts",
    "runtime.sparse_tensor": "sparse gradient tensors",
    "runtime.superoffload": "SuperOffload",
    "runtime.swap_tensor": "nvme",
    "runtime.tensor_parallel": "AutoTP's classes",
    "runtime.torch_autocast": "communication types",
    "runtime.weight_quantizer": "weight quantization",
    "runtime.zenflow": "ZenFlow",
    "sequence.auto": "AutoSP",
    "sequence.fpdt_layer": "FPDT",
}

# Keys whose default differs from DeepSpeed 0.19.6's on purpose; core/tests/compat/test_defaults.py compares all others.
# Key -> both defaults, as the configuration has them, and why.
DEFAULTS = {
    "tensor_parallel.dtype": Default(None, "torch.float16", "The model is divided in its own type."),
    "zero_optimization.overlap_comm": Default(
        True, None, "Gradients are reduced while backward runs at every stage; null there means at stage 3 only."
    ),
}


@functools.cache
def upstream_names() -> Mapping[str, Mapping[str, str]]:
    """Module, with `deepspeed` -> public name -> "class", "def" or "value"; an address, if it is taken from there."""
    text = Path(__file__).with_name("names.json").read_text(encoding="utf-8")
    names: dict[str, dict[str, str]] = json.loads(text)
    return names


@functools.cache
def differences() -> Mapping[str, tuple[tuple[str, ...], str]]:
    """Members of classes and arguments of functions that are not here, and why.

    "module:Class", "module:Class.method" or "module:function", below `deepspeed` -> (names, reason). Methods of the
    engine that are not here are in `features.py`.
    """
    table = json.loads(Path(__file__).with_name("members.json").read_text(encoding="utf-8"))
    return {where: (tuple(names), reason) for where, (names, reason) in table.items()}


def feature_of(module: str) -> Feature:
    """The feature of a module, by its name with `deepspeed`, that is not here or lacks names."""
    below = module.removeprefix("deepspeed").removeprefix(".")
    if below in MODULES:
        return FEATURES[MODULES[below].feature]
    longest = max((start for start in _FEATURE_OF if below.startswith(start)), key=len)
    return FEATURES[_FEATURE_OF[longest]]
