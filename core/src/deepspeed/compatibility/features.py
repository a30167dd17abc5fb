"""The features and engine methods that are not here yet, with what to do instead.

`hasattr(engine, name)` is False for such a method; looking one up raises an `AttributeError` with the sentence. Methods
that only read a value are in `engine/accessors.py`.
"""

from deepspeed.compatibility.records import EngineMethod, Feature

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
    "eigenvalue": Feature("eigenvalue estimation", "leave eigenvalue out of the configuration"),
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
    "quantize_training": "read compression_training of the configuration, and engine.compression_scheduler",
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
