"""Tables of the engine's read-only getters: name -> how the getter finds its value.

DeepSpeed's documented interface has a method for almost every configuration value, and attributes for the arguments of
`initialize`. `with_accessors` adds them to the engine's class; the methods take no argument. `build.py` reads the
configuration's values once, so that the engine need not keep the configuration.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from deepspeed import comm
from deepspeed.config.precision import FP16Config, torch_dtype
from deepspeed.config.zero import OffloadOptimizerConfig
from deepspeed.moe.layer import has_moe_layers, moe_layers

Engine = TypeVar("Engine", bound=type)


def _dynamic_loss_scale_args(fp16: FP16Config) -> dict[str, Any] | None:
    """Arguments of the dynamic loss scale, under DeepSpeed's names; None where the scale is fixed or fp16 is off."""
    if not fp16.enabled or fp16.loss_scale > 0:
        return None
    return {
        "init_scale": 2.0**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


def _of_offload(name: str) -> tuple[str, Callable[[OffloadOptimizerConfig | None], Any]]:
    """Return the section's path and a getter of one of its keys; an absent section has the defaults, and no offload."""
    return "zero_optimization.offload_optimizer", lambda section: getattr(section or OffloadOptimizerConfig(), name)


def _is_offloaded(section: OffloadOptimizerConfig | None) -> bool:
    return section is not None and section.device == "cpu"


def _updates_on_host(section: OffloadOptimizerConfig | None) -> bool:
    return section is not None and section.device != "none"


def _as_dict(section: BaseModel) -> dict[str, Any]:
    return section.model_dump(exclude_none=True)


def _section_as_written(name: str) -> tuple[str, Callable[[Mapping[str, Any]], Any]]:
    return "raw", lambda raw: raw.get(name, {})


#: values of the validated configuration: method name -> dotted path below the config root, or the path and a function
#: of the value there
FROM_CONFIG: dict[str, str | tuple[str, Callable[[Any], Any]]] = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "log_level": "log_level",
    "tensor_parallel_config": "tensor_parallel",
    "zenflow_config": "zero_optimization.zenflow",
    "zero_allgather_sequential": "zero_optimization.allgather_sequential",
    "zero_compute_grad_norm": "zero_optimization.compute_grad_norm",
    "zero_parameter_alignment": "zero_optimization.parameter_alignment",
    "zero_save_muon_momentum_buffer_in_memory": "zero_optimization.save_muon_momentum_buffer_in_memory",
    "aio_config": ("aio", lambda aio: aio.model_dump()),
    "amp_enabled": "amp.enabled",
    "amp_params": ("raw", lambda raw: raw.get("amp", False)),
    "autotp_size": "tensor_parallel.autotp_size",
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_metric_path": "autotuning.metric_path",
    "autotuning_model_info_path": "autotuning.model_info_path",
    "autotuning_profile_model_info": "autotuning.profiles_model_info",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "bfloat16_enabled": "bf16.enabled",
    "bfloat16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "checkpoint_tag_validation_enabled": "checkpoint.tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint.tag_validation_fail",
    "cpuadam_cores_perc": _of_offload("cpuadam_cores_perc"),
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_learning_config": ("data_efficiency.data_sampling.curriculum_learning", _as_dict),
    "curriculum_learning_enabled": ("data_efficiency", lambda section: section.asks_for_curriculum()),
    "curriculum_params_legacy": _section_as_written("curriculum_learning"),
    "data_efficiency_config": _section_as_written("data_efficiency"),
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_sampling_config": ("data_efficiency.data_sampling", _as_dict),
    "data_sampling_enabled": ("data_efficiency", lambda section: section.enabled and section.data_sampling.enabled),
    "dataloader_drop_last": "dataloader_drop_last",
    "disable_allgather": "disable_allgather",
    "dump_state": "dump_state",
    "dynamic_loss_scale_args": ("fp16", _dynamic_loss_scale_args),
    "eigenvalue_enabled": "eigenvalue.enabled",
    "eigenvalue_gas_boundary_resolution": "eigenvalue.gas_boundary_resolution",
    "eigenvalue_layer_name": "eigenvalue.layer_name",
    "eigenvalue_layer_num": "eigenvalue.layer_num",
    "eigenvalue_max_iter": "eigenvalue.max_iter",
    "eigenvalue_stability": "eigenvalue.stability",
    "eigenvalue_tol": "eigenvalue.tol",
    "eigenvalue_verbose": "eigenvalue.verbose",
    "elasticity_enabled": "elasticity.enabled",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "graph_harvesting": "graph_harvesting",
    "initial_dynamic_scale": ("fp16.initial_scale_power", lambda power: 2.0**power),
    "initial_scale_power": "fp16.initial_scale_power",
    "is_deepcompile_enabled": "compile.deepcompile",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "optimizer_legacy_fusion": ("optimizer", lambda section: bool(section and section.legacy_fusion)),
    "optimizer_name": "optimizer_name",
    "optimizer_params": "optimizer_params",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_gamma": "progressive_layer_drop.gamma",
    "pld_theta": "progressive_layer_drop.theta",
    "postscale_gradients": ("prescale_gradients", lambda prescales: not prescales),
    "random_ltd_config": ("data_efficiency.data_routing.random_ltd", _as_dict),
    "random_ltd_enabled": ("data_efficiency", lambda section: section.asks_for_random_ltd()),
    "scheduler_name": "scheduler_name",
    "scheduler_params": "scheduler_params",
    "sparse_gradients_enabled": "sparse_gradients",
    "steps_per_print": "steps_per_print",
    "super_offload": _of_offload("super_offload"),
    "swap_tensor_config": ("aio", lambda aio: aio.model_dump()),
    "torch_autocast_dtype": ("torch_autocast.dtype", torch_dtype),
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_cpu_offload": ("zero_optimization.offload_optimizer", _is_offloaded),
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_grad_hooks": "zero_optimization.grad_hooks",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_legacy_stage1": "zero_optimization.legacy_stage1",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_log_trace_cache_warnings": "zero_optimization.log_trace_cache_warnings",
    "zero_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.max_reuse_distance",
    "zero_model_persistence_threshold": "zero_optimization.model_persistence_threshold",
    "zero_module_granularity_threshold": "zero_optimization.module_granularity_threshold",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_optimization": ("zero_optimization.stage", lambda stage: stage > 0),
    "zero_optimization_partition_gradients": ("zero_optimization.stage", lambda stage: stage >= 2),
    "zero_optimization_partition_weights": ("zero_optimization.stage", lambda stage: stage >= 3),
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_partial_offload": _of_offload("ratio"),
    "zero_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_use_cpu_optimizer": ("zero_optimization.offload_optimizer", _updates_on_host),
    "zeropp_loco_param": (
        "zero_optimization.zeropp_loco_param",
        lambda section: section and section.model_dump(by_alias=True),
    ),
}

#: values that are read from the engine itself
FROM_ENGINE: dict[str, Callable[[Any], Any]] = {
    "dynamic_loss_scale": lambda engine: engine.precision.loss_scaler.is_dynamic,
    "empty_partition_cache": lambda engine: engine.sharding.release_gathered(),
    "get_batch_info": lambda engine: (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ),
    "get_data_types": lambda engine: (
        engine.precision.model_dtype or torch.float32,
        engine.sharding.options.accumulation_dtype or engine.precision.model_dtype or torch.float32,
    ),
    "get_data_parallel_rank": lambda engine: engine.mesh.rank("dp"),
    "get_global_grad_norm": lambda engine: engine._training.stats.grad_norm if engine._training.stats else None,
    "get_model_parallel_rank": lambda engine: engine.mesh.model_rank,
    "get_pld_theta": lambda engine: engine.progressive_layer_drop and engine.progressive_layer_drop.get_theta(),
    "get_sequence_parallel_group": lambda engine: engine.seq_parallel_group,
    "get_tensor_parallel_rank": lambda engine: engine.mesh.rank("tp"),
    "get_type": lambda engine: engine._training.group_values("type"),
    "gradient_accumulation_steps": lambda engine: engine.schedule.num_steps,
    "is_deepcompile_active": lambda engine: False,  # DeepCompile is refused
    "is_elastic_model_parallel_supported": lambda engine: False,
    "is_first_weights_partition_group": lambda engine: (
        engine.sharding.stage == 3 and engine.sharding.units.ranks.is_first_copy
    ),
    "is_gradient_accumulation_boundary": lambda engine: engine.schedule.is_boundary(),
    "loss_scale": lambda engine: engine.precision.loss_scaler.loss_scale,
    "pld_params": lambda engine: (
        {"theta": engine.pld_theta(), "gamma": engine.pld_gamma()} if engine.pld_enabled() else False
    ),
    "train_batch_size": lambda engine: engine._training.train_batch_size,
    "train_micro_batch_size_per_gpu": lambda engine: engine._micro_batch_size,
    "was_step_applied": lambda engine: engine._training.has_applied,
    "zero_has_nvme_offload": lambda engine: engine.sharding.placement.fetches,
    "zero_nvme_offload_optimizer": lambda engine: engine.sharding.placement.fetches,
    "zero_overlap_comm": lambda engine: engine.sharding.options.overlap,
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
    "data_parallel_group": lambda engine: engine.mesh.group("dp"),
    "compression_scheduler": lambda engine: engine._step_schedules and engine._step_schedules.compression,
    "curriculum_scheduler_legacy": lambda engine: (
        engine._step_schedules and engine._step_schedules.scheduler_of_curriculum()
    ),
    "dp_world_size": lambda engine: engine.mesh.size("dp"),
    "flops_profiler": lambda engine: engine._observers.profile and engine._observers.profile.profiler,
    "global_rank": lambda engine: comm.get_rank(),
    "local_rank": lambda engine: engine._arguments.get("local_rank", 0),
    "mp_world_size": lambda engine: engine.mesh.size("tp"),
    "seq_data_parallel_group": lambda engine: engine.mesh.gradient_group(),
    "seq_dp_world_size": lambda engine: engine.mesh.size("dp", "sp"),
    "sequence_parallel_size": lambda engine: engine.mesh.size("sp"),
    "seq_parallel_group": lambda engine: engine.mesh.group("sp") if engine.mesh.size("sp") > 1 else None,
    "moe_layers": lambda engine: moe_layers(engine.module),
    "param_names": lambda engine: {parameter: name for name, parameter in engine.module.named_parameters()},
    "has_moe_layers": lambda engine: has_moe_layers(engine.module)[0],
    "num_experts": lambda engine: [layer.num_experts for layer in moe_layers(engine.module)],
    "pipeline_parallelism": lambda engine: False,  # `PipelineEngine` has its own
    "progressive_layer_drop": lambda engine: engine._step_schedules and engine._step_schedules.layer_drop,
    "random_ltd_scheduler": lambda engine: engine._step_schedules and engine._step_schedules.random_ltd,
    "mpu": lambda engine: engine._arguments.get("mpu"),
    "training_data": lambda engine: engine._arguments.get("training_data"),
    "world_size": lambda engine: comm.get_world_size(),
}

#: attributes that belong to a part of the engine: name -> (part, attribute of the part); users may assign them too
DELEGATED = {
    "basic_optimizer": ("_training", "basic_optimizer"),
    "global_samples": ("_training.progress", "global_samples"),
    "global_steps": ("_training.progress", "global_steps"),
    "lr_scheduler": ("_training", "lr_scheduler"),
    "micro_steps": ("schedule", "micro_steps"),
    "optimizer": ("_training", "optimizer"),
    "skipped_steps": ("_training.progress", "skipped_steps"),
    "_train_batch_size": ("_training", "train_batch_size"),
}


def read_answers(config: Any) -> dict[str, Any]:
    """Return the values of the getters of `FROM_CONFIG`, by name. Called once, by `build.py`."""
    answers = {}
    for name, source in FROM_CONFIG.items():
        path, convert = (source, None) if isinstance(source, str) else source
        value = attrgetter(path)(config)
        answers[name] = value if convert is None else convert(value)
    return answers


def with_accessors(cls: Engine) -> Engine:
    """Add the getters and attributes of the tables to the engine's class; a class decorator."""
    for name, source in FROM_CONFIG.items():
        setattr(cls, name, _answer(name, source if isinstance(source, str) else source[0]))
    for name, function in FROM_ENGINE.items():
        setattr(cls, name, _method(name, function))
    for name, function in ATTRIBUTES.items():
        setattr(cls, name, property(function))
    for name, (part, attribute) in DELEGATED.items():
        setattr(cls, name, _delegated(attrgetter(part), attribute))
    cls.enable_backward_allreduce = property(lambda engine: True, _keep_reducing)  # type: ignore[attr-defined]
    return cls


def _keep_reducing(engine: Any, value: bool) -> None:
    """Refuse False, which megatron-like loops set to reduce gradients themselves: stages 1 to 3 keep shards of sums."""
    if not value:
        raise ValueError(
            f"engine.enable_backward_allreduce = {value}: this engine reduces gradients in backward() and step();"
            " postpone the reduction with engine.no_sync(), and call no all-reduce of your own"
        )


def _delegated(part: Callable[[Any], Any], attribute: str) -> property:
    return property(
        lambda engine: getattr(part(engine), attribute),
        lambda engine, value: setattr(part(engine), attribute, value),
    )


def _answer(name: str, path: str) -> Callable[[Any], Any]:
    get = _method(name, lambda engine: engine._answers[name])
    get.__doc__ = f"From the configuration's `{path}`."
    return get


def _method(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return function(self)

    get.__name__, get.__doc__ = name, function.__doc__
    return get
