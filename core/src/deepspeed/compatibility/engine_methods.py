"""DeepSpeed's public engine methods that are not here yet, with what to do instead.

`hasattr(engine, name)` is False for them; looking one up raises an `AttributeError` with the sentence. Methods that
only read a value are in `engine/accessors.py`.
"""

from deepspeed.compatibility.records import EngineMethod

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
