"""The engine's read-only getters, as tables: name -> how it is answered.

DeepSpeed's documented interface has a method for almost every configuration value, and attributes for what `initialize`
was given. They are made here from the tables and mixed into `DeepSpeedEngine`; the methods take no argument.
"""

from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm

#: answered from the validated configuration: method name -> dotted path below the config root
FROM_CONFIG = {
    "amp_enabled": "amp.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "dump_state": "dump_state",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "initial_scale_power": "fp16.initial_scale_power",
    "memory_breakdown": "memory_breakdown",
    "optimizer_name": "optimizer_name",
    "optimizer_params": "optimizer_params",
    "scheduler_name": "scheduler_name",
    "scheduler_params": "scheduler_params",
    "sparse_gradients_enabled": "sparse_gradients",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
}

#: answered from the engine itself
FROM_ENGINE: dict[str, Callable[[Any], Any]] = {
    "dynamic_loss_scale": lambda engine: engine.precision.loss_scaler.is_dynamic,
    "get_batch_info": lambda engine: (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ),
    "get_global_grad_norm": lambda engine: engine._stats.grad_norm if engine._stats is not None else None,
    "gradient_accumulation_steps": lambda engine: engine.schedule.num_steps,
    "is_gradient_accumulation_boundary": lambda engine: engine.schedule.is_boundary(),
    "loss_scale": lambda engine: engine.precision.loss_scaler.loss_scale,
    "postscale_gradients": lambda engine: not engine._config.prescale_gradients,
    "train_batch_size": lambda engine: engine._train_batch_size,
    "train_micro_batch_size_per_gpu": lambda engine: engine._micro_batch_size,
    "was_step_applied": lambda engine: engine._stats is not None and engine._stats.applied,
    "zero_optimization": lambda engine: engine._config.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda engine: engine._config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine._config.zero_optimization.stage >= 3,
    "zero_overlap_comm": lambda engine: engine.sharding.options.overlap,
    "zero_optimization_stage": lambda engine: engine._config.zero_optimization.stage,
}

#: attributes, read without a call
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "client_lr_scheduler": lambda engine: engine._arguments.get("lr_scheduler"),
    "client_optimizer": lambda engine: engine._arguments.get("optimizer"),
    "communication_data_type": lambda engine: (
        engine.sharding.options.wire_dtype
        or engine.sharding.options.accumulation_dtype
        or engine.precision.model_dtype
        or torch.float32
    ),
    "dp_world_size": lambda engine: engine.sharding.world_size,
    "global_rank": lambda engine: comm.get_rank(),
    "local_rank": lambda engine: engine._arguments.get("local_rank", 0),
    "mp_world_size": lambda engine: 1,  # initialize refuses more
    "mpu": lambda engine: engine._arguments.get("mpu"),
    "training_data": lambda engine: engine._arguments.get("training_data"),
    "world_size": lambda engine: comm.get_world_size(),
}

#: what DeepSpeed documents and this version has not: name -> what there is instead, for the AttributeError
NOT_HERE = {
    "allreduce_gradients": "backward and step exchange the gradients themselves; no_sync() lets them wait",
    "checkpoint_engine": "save_checkpoint writes through engine.checkpointer.store",
    "eval_batch": "it belongs to pipeline parallelism; call engine.eval() and the engine itself",
    "offload_states": '"zero_optimization": {"offload_optimizer": ...} keeps optimizer states in host memory',
    "reload_states": '"zero_optimization": {"offload_optimizer": ...} keeps optimizer states in host memory',
    "train_batch": "it belongs to pipeline parallelism; call the engine, backward and step",
}


class EngineAccessors:
    """Mixed into `DeepSpeedEngine`; its methods and properties are the tables above."""


def _from_config(path: str) -> Callable[[Any], Any]:
    def get(engine: Any) -> Any:
        value = engine._config
        for name in path.split("."):
            value = getattr(value, name)
        return value

    get.__doc__ = f"The configuration's `{path}`."
    return get


def _named(function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return function(self)

    get.__name__, get.__doc__ = name, function.__doc__
    return get


for _name, _path in FROM_CONFIG.items():
    setattr(EngineAccessors, _name, _named(_from_config(_path), _name))
for _name, _function in FROM_ENGINE.items():
    setattr(EngineAccessors, _name, _named(_function, _name))
for _name, _function in ATTRIBUTES.items():
    setattr(EngineAccessors, _name, property(_function))
