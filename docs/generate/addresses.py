"""The table of old addresses: where DeepSpeed's users import from, and where that lives here.

Modules of features that are not here yet are in `deepspeed/compatibility/features.py`.
`old_addresses.py` beside it writes the files and the reference page. All names are below `deepspeed.`.
"""

# Old module -> new module. The old name *is* the new module, so a patched attribute reaches the real code.
ALIASES = {
    "accelerator.real_accelerator": "accelerator.current",
    "compression.utils": "compression.quantizers",
    "runtime.eigenvalue": "compression.eigenvalue",
    "runtime.quantize": "compression.moq",
    "inference.quantization.layers": "ops.quantizer.layers",
    "profiling.flops_profiler.profiler": "profiling.flops",
    "runtime.activation_checkpointing.checkpointing": "activation.checkpointing",
    "runtime.compiler": "engine.compiler",
    "runtime.data_pipeline.data_sampling.indexed_dataset": "data.indexed_dataset",
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": "data.variable_batch",
    "runtime.dataloader": "data.loader",
    "runtime.engine": "engine.engine",
    "runtime.hybrid_engine": "engine.hybrid",
    "runtime.fp16.loss_scaler": "precision.policy",
    "runtime.lr_schedules": "optim.lr_schedules",
    "runtime.pipe.engine": "engine.pipeline",
    "runtime.pipe.module": "pipe.module",
    "runtime.pipe.schedule": "pipe.schedule",
    "runtime.pipe.topology": "pipe.topology",
    "runtime.zero.partition_parameters": "zero.construct",
    "runtime.zero.tiling": "zero.tiling",
    "utils.groups": "parallel.groups",
    "utils.logging": "log",
    "utils.tensor_fragment": "zero.fragments",
    "utils.timer": "profiling.timer",
    "utils.zero_to_fp32": "checkpoint.consolidate",
    "runtime.constants": "config.constants",
}

# Old module of those -> names that the new one does not have: old name -> "new.module:name".
BESIDE = {
    "runtime.engine": {
        name: f"engine.optimizers:{name}" for name in ("DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable")
    },
}

# `deepspeed.runtime.config` has the optimizers' names beside its classes.
_OPTIMIZERS = "adagrad adam adamw lamb lion muon onebit_adam onebit_lamb zero_one_adam muadam muadamw musgd"
_OPTIMIZER_NAMES = {
    name: f"config.constants:{name}"
    for name in (
        *(f"{word.upper()}_OPTIMIZER" for word in _OPTIMIZERS.split()),
        *("DEEPSPEED_OPTIMIZERS", "TORCH_ADAM_PARAM", "ADAM_W_MODE", "ADAM_W_MODE_DEFAULT"),
    )
}

_CHECKPOINT_NAMES = (
    "ZERO_FILE_PREFIX FP16_ZERO_FILE_PREFIX BF16_ZERO_FILE_PREFIX OPTIM_FILE_SUFFIX MODEL_FILE_PREFIX "
    "MODEL_FILE_SUFFIX LAYER_FILE_PREFIX OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS "
    "BASE_OPTIMIZER_STATE SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARTITION_COUNT "
    "ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES PARAM_SLICE_MAPPINGS FROZEN_PARAM_SHAPES "
    "FROZEN_PARAM_FRAGMENTS BUFFER_NAMES DS_VERSION UNIVERSAL_CHECKPOINT_INFO "
    "UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE FP32_WEIGHT_KEY CAT_DIM "
    "VOCAB_TENSOR ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE "
    "VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
    "TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS "
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
    "PARAMETER_WITH_SUB_PARAMS EXPERT_PARAMETER_PATTERNS"
)

# Old module -> its names, from several new modules or under another name: old name -> "new.module:name".
COLLECTIONS = {
    "checkpoint.constants": {name: f"checkpoint.deepspeed_files:{name}" for name in _CHECKPOINT_NAMES.split()},
    "checkpoint.utils": {"clone_tensors_for_torch_save": "checkpoint.stores:clone_tensors_for_torch_save"},
    "comm.reduce_op": {"ReduceOp": "comm:ReduceOp"},
    "compression.config": {"get_compression_config": "compression.compress:get_compression_config"},
    "compression.helper": {
        name: f"compression.compress:{name}"
        for name in (
            *("convert_conv1d_to_linear", "fix_compression", "module_replacement"),
            *("recursive_getattr", "recursive_setattr"),
        )
    },
    "constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "comm.start:DEFAULT_PORT",
        "default_pg_timeout": "comm.start:DEFAULT_TIMEOUT",
    },
    "elasticity.constants": {
        "ELASTICITY": "elasticity.config:ELASTICITY",
        "LATEST_ELASTICITY_VERSION": "elasticity.config:LATEST_ELASTICITY_VERSION",
        "MINIMUM_DEEPSPEED_VERSION": "elasticity.config:MINIMUM_DEEPSPEED_VERSION",
        "DEEPSPEED_ELASTICITY_CONFIG": "elasticity.config:DEEPSPEED_ELASTICITY_CONFIG",
        "ENABLED": "elasticity.config:ENABLED",
        "ENABLED_DEFAULT": "elasticity.config:ENABLED_DEFAULT",
        "MAX_ACCEPTABLE_BATCH_SIZE": "elasticity.config:MAX_ACCEPTABLE_BATCH_SIZE",
        "MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT": "elasticity.config:MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT",
        "MICRO_BATCHES": "elasticity.config:MICRO_BATCHES",
        "MICRO_BATCHES_DEFAULT": "elasticity.config:MICRO_BATCHES_DEFAULT",
        "MIN_GPUS": "elasticity.config:MIN_GPUS",
        "MIN_GPUS_DEFAULT": "elasticity.config:MIN_GPUS_DEFAULT",
        "MAX_GPUS": "elasticity.config:MAX_GPUS",
        "MAX_GPUS_DEFAULT": "elasticity.config:MAX_GPUS_DEFAULT",
        "NUM_GPUS_PER_NODE": "elasticity.config:NUM_GPUS_PER_NODE",
        "NUM_GPUS_PER_NODE_DEFAULT": "elasticity.config:NUM_GPUS_PER_NODE_DEFAULT",
        "MODEL_PARALLEL_SIZE": "elasticity.config:MODEL_PARALLEL_SIZE",
        "MODEL_PARALLEL_SIZE_DEFAULT": "elasticity.config:MODEL_PARALLEL_SIZE_DEFAULT",
        "MIN_TIME": "elasticity.config:MIN_TIME",
        "MIN_TIME_DEFAULT": "elasticity.config:MIN_TIME_DEFAULT",
        "PREFER_LARGER_BATCH": "elasticity.config:PREFER_LARGER_BATCH",
        "PREFER_LARGER_BATCH_DEFAULT": "elasticity.config:PREFER_LARGER_BATCH_DEFAULT",
        "IGNORE_NON_ELASTIC_BATCH_INFO": "elasticity.config:IGNORE_NON_ELASTIC_BATCH_INFO",
        "IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT": "elasticity.config:IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT",
        "VERSION": "elasticity.config:VERSION",
        "VERSION_DEFAULT": "elasticity.config:VERSION_DEFAULT",
        "FORMAT": "elasticity.config:FORMAT",
    },
    "elasticity.utils": {
        "is_torch_elastic_compatible": "elasticity.elasticity:is_torch_elastic_compatible",
    },
    "inference.quantization.quantization": {
        "_init_group_wise_weight_quantization": "inference.weight_quantization:_init_group_wise_weight_quantization",
    },
    "inference.quantization.quantization_context": {
        "QuantizationContext": "inference.weight_quantization:QuantizationContext",
    },
    "inference.v2.config_v2": {
        "DeepSpeedTPConfig": "config.inference:DeepSpeedTPConfig",
        "QuantizationConfig": "config.inference:RaggedQuantizationConfig",
        "RaggedInferenceEngineConfig": "config.inference:RaggedInferenceEngineConfig",
    },
    "inference.v2.engine_factory": {
        name: f"inference.v2.engine_v2:{name}" for name in ("build_engine_from_ds_checkpoint", "build_hf_engine")
    },
    "inference.v2.ragged.manager_configs": {
        name: f"config.inference:{name}" for name in ("DSStateManagerConfig", "MemoryConfig")
    },
    "inference.v2.scheduling_utils": {
        name: f"inference.v2.paged_cache:{name}" for name in ("SchedulingError", "SchedulingResult")
    },
    "module_inject.tp_training": {
        "tp_model_init": "tensor_parallel.entry:tp_model_init",
    },
    "ops.adam.cpu_adam": {"DeepSpeedCPUAdam": "ops.adam.adam:DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"FusedAdam": "ops.adam.adam:FusedAdam"},
    "ops.lion.cpu_lion": {"DeepSpeedCPULion": "ops.lion.lion:DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"FusedLion": "ops.lion.lion:FusedLion"},
    "ops.quantizer.quantizer": {"ds_quantizer": "ops.quantizer.groups:ds_quantizer"},
    "profiling.config": {
        "DeepSpeedFlopsProfilerConfig": "config.monitor:FlopsProfilerConfig",
    },
    "monitor.config": {
        "CSVConfig": "config.monitor:CSVConfig",
        "CometConfig": "config.monitor:CometConfig",
        "DeepSpeedMonitorConfig": "config.monitor:MonitorConfig",
        "TensorBoardConfig": "config.monitor:TensorBoardConfig",
        "WandbConfig": "config.monitor:WandbConfig",
    },
    "monitor.comet": {"CometMonitor": "monitor.monitor:CometMonitor", "Event": "monitor.monitor:Event"},
    "monitor.csv_monitor": {"csvMonitor": "monitor.monitor:csvMonitor"},
    "monitor.tensorboard": {"TensorBoardMonitor": "monitor.monitor:TensorBoardMonitor"},
    "monitor.wandb": {"WandbMonitor": "monitor.monitor:WandbMonitor"},
    "moe.mappings": {
        "drop_tokens": "moe.dispatch:drop_tokens",
        "gather_tokens": "moe.dispatch:gather_tokens",
    },
    "inference.config": {
        name: f"config.inference:{name}"
        for name in (
            "DeepSpeedInferenceConfig",
            "DeepSpeedTPConfig",
            "InferenceCheckpointConfig",
            "QuantizationConfig",
        )
    },
    "ops.fp_quantizer.fp8_gemm": {"matmul_fp8": "ops.fp_quantizer.quantize:matmul_fp8"},
    "sequence.cross_entropy": {
        name: f"sequence.loss:{name}"
        for name in ("vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy")
    },
    "moe.sharded_moe": {
        "MOELayer": "moe.layer:MOELayer",
        "TopKGate": "moe.gate:TopKGate",
        **{name: f"moe.gate:{name}" for name in ("top1gating", "top2gating", "topkgating")},
    },
    "moe.utils": {
        "has_moe_layers": "moe.layer:has_moe_layers",
        **{
            name: f"parallel.model_part:{name}"
            for name in (
                *("configure_moe_param_groups", "is_moe_param", "is_moe_param_group"),
                "split_params_grads_into_shared_and_expert_params",
                "split_params_into_different_moe_groups_for_optimizer",
                "split_params_into_shared_and_expert_params",
            )
        },
    },
    "runtime.data_pipeline.curriculum_scheduler": {"CurriculumScheduler": "data.curriculum:CurriculumScheduler"},
    "runtime.data_pipeline.data_routing.basic_layer": {"RandomLayerTokenDrop": "data.random_ltd:RandomLayerTokenDrop"},
    "runtime.data_pipeline.data_routing.helper": {
        name: f"data.random_ltd:{name}"
        for name in ("convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd")
    },
    "runtime.data_pipeline.data_routing.scheduler": {"RandomLTDScheduler": "data.random_ltd:RandomLTDScheduler"},
    "runtime.data_pipeline.data_sampling.data_analyzer": {
        name: f"data.analyzer:{name}" for name in ("DataAnalyzer", "DistributedDataAnalyzer")
    },
    "runtime.data_pipeline.data_sampling.utils": {
        **{name: f"data.analyzer:{name}" for name in ("split_dataset", "split_index")},
        **{
            name: f"data.indexed_dataset:{name}"
            for name in ("close_mmap_dataset_builder", "create_mmap_dataset_builder", "find_fit_int_dtype")
        },
    },
    "runtime.data_pipeline.data_sampling.data_sampler": {"DeepSpeedDataSampler": "data.sampler:DeepSpeedDataSampler"},
    "runtime.fp16.onebit.adam": {"OnebitAdam": "optim.one_bit:OnebitAdam"},
    "runtime.fp16.onebit.lamb": {"OnebitLamb": "optim.one_bit_lamb:OnebitLamb"},
    "runtime.fp16.onebit.zoadam": {"ZeroOneAdam": "optim.zero_one_adam:ZeroOneAdam"},
    "runtime.progressive_layer_drop": {"ProgressiveLayerDrop": "engine.step_schedules:ProgressiveLayerDrop"},
    "runtime.base_optimizer": {
        "DeepSpeedOptimizer": "zero.optimizer:DeepSpeedOptimizer",
        "ZeROOptimizer": "zero.optimizer:ZeroOptimizer",
    },
    "runtime.config": {
        "DeepSpeedConfig": "config.root:DeepSpeedConfig",
        "DeepSpeedConfigError": "errors:ConfigError",
        **_OPTIMIZER_NAMES,
    },
    "runtime.utils": {
        "CheckOverflow": "optim.norm:CheckOverflow",
        "PartitionedTensor": "pipe.messages:PartitionedTensor",
        **{
            name: f"data.loader:{name}"
            for name in ("compare_tensors_in_structures", "copy_to_device", "get_tensor_bytes")
        },
        "clip_grad_norm_": "optim.norm:clip_grad_norm_",
        "clip_tensors_by_global_norm": "optim.norm:clip_tensors_by_global_norm",
        "get_global_norm": "optim.norm:get_global_norm",
        "get_global_norm_of_tensors": "optim.norm:get_global_norm_of_tensors",
        "get_grad_norm": "optim.norm:get_grad_norm",
        "get_weight_norm": "optim.norm:get_weight_norm",
        "move_to_device": "data.loader:move_to_device",
        "partition_balanced": "pipe.layers:partition_balanced",
        "partition_uniform": "pipe.layers:partition_uniform",
        "see_memory_usage": "profiling.breakdown:see_memory_usage",
        "set_random_seed": "accelerator.current:set_random_seed",
    },
    "runtime.sequence_parallel.ulysses_sp": {
        "SequenceTiledCompute": "sequence.tiled:SequenceTiledCompute",
        "TiledFusedLogitsLoss": "sequence.tiled:TiledFusedLogitsLoss",
        "TiledMLP": "sequence.tiled:TiledMLP",
        "sequence_tiled_compute": "sequence.tiled:sequence_tiled_compute",
        "UlyssesSPAttentionHF": "sequence.hugging_face:UlyssesSPAttentionHF",
        "UlyssesSPDataLoaderAdapter": "sequence.batches:UlyssesSPDataLoaderAdapter",
    },
    "runtime.zero.config": {
        "DeepSpeedZeroConfig": "config.zero:ZeroConfig",
        "ZERO_OPTIMIZATION": "config.constants:ZERO_OPTIMIZATION",
        "ZeroStageEnum": "config.constants:ZeroStageEnum",
        "get_zero_config": "config.intake:get_zero_config",
    },
    "runtime.zero.offload_config": {
        "DeepSpeedZeroOffloadOptimizerConfig": "config.zero:OffloadOptimizerConfig",
        "DeepSpeedZeroOffloadParamConfig": "config.zero:OffloadParamConfig",
        "OffloadDeviceEnum": "config.constants:OffloadDeviceEnum",
        "OffloadStateTypeEnum": "config.constants:OffloadStateTypeEnum",
    },
    "runtime.zero.offload_states": {
        "get_state_devices": "zero.offload.moved_states:get_state_devices",
    },
    "runtime.zero.utils": {
        "apply_to_tensors_only": "data.loader:apply_to_tensors_only",
        "is_zero_supported_optimizer": "optim.traits:is_tested_with_zero",
        "isinstance_namedtuple": "data.loader:isinstance_namedtuple",
    },
    "runtime.zero.local_access": {
        "safe_get_local_fp32_param": "zero.fragments:safe_get_local_fp32_param",
        "safe_get_local_grad": "zero.fragments:safe_get_local_grad",
        "safe_get_local_optimizer_state": "zero.fragments:safe_get_local_optimizer_state",
        "safe_set_local_fp32_param": "zero.fragments:safe_set_local_fp32_param",
        "safe_set_local_grad": "zero.fragments:safe_set_local_grad",
        "safe_set_local_optimizer_state": "zero.fragments:safe_set_local_optimizer_state",
    },
    "runtime.zero.mics": {
        "MiCS_Init": "zero.construct:MiCS_Init",
        "MiCS_Offload": "zero.module_hooks:ModuleHooks",
        "MiCS_Optimizer": "zero.optimizer:ZeroOptimizer",
    },
    "runtime.zero.parameter_offload": {
        "DeepSpeedZeRoOffload": "zero.module_hooks:ModuleHooks",
    },
    "utils.init_on_device": {"OnDevice": "zero.construct:OnDevice"},
    "runtime.zero.stage3": {
        "unwrap_model_for_generation": "zero.gather:unwrap_model_for_generation",
        "DeepSpeedZeroOptimizer_Stage3": "zero.optimizer:ZeroOptimizer",
        "estimate_zero3_model_states_mem_needs": "zero.tools:estimate_zero3_model_states_mem_needs",
        "estimate_zero3_model_states_mem_needs_all_cold": ("zero.tools:estimate_zero3_model_states_mem_needs_all_cold"),
        "estimate_zero3_model_states_mem_needs_all_live": ("zero.tools:estimate_zero3_model_states_mem_needs_all_live"),
    },
    "runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": "zero.optimizer:ZeroOptimizer",
        "estimate_zero2_model_states_mem_needs": "zero.tools:estimate_zero2_model_states_mem_needs",
        "estimate_zero2_model_states_mem_needs_all_cold": ("zero.tools:estimate_zero2_model_states_mem_needs_all_cold"),
        "estimate_zero2_model_states_mem_needs_all_live": ("zero.tools:estimate_zero2_model_states_mem_needs_all_live"),
    },
    "utils.z3_leaf_module": {
        name: f"zero.module_units:{name}"
        for name in (
            *("get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name"),
            *("set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter"),
        )
    },
    "runtime.torch_autocast": {
        name: f"precision.policy:{name}"
        for name in ("autocast_if_enabled", "get_default_autocast_lower_precision_modules")
    },
    "utils.numa": {
        name: f"launcher.resources:{name}"
        for name in (
            *("check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd"),
            *("parse_range", "parse_range_list"),
        )
    },
    "runtime.config_utils": {
        "DeepSpeedConfigModel": "config.base:Section",
        "dict_raise_error_on_duplicate_keys": "config.read:refuse_duplicates",
        "get_dict_param": "config.intake:get_dict_param",
        "get_list_param": "config.intake:get_list_param",
        "get_scalar_param": "config.intake:get_scalar_param",
    },
    "runtime.precision_config": {
        "DeepSpeedBF16Config": "config.precision:BF16Config",
        "DeepSpeedFP16Config": "config.precision:FP16Config",
        "get_bfloat16_config": "config.intake:get_bfloat16_config",
        "get_float16_config": "config.intake:get_float16_config",
    },
}

# Old package -> names it has beside its modules. Packages that only hold modules are not listed.
PACKAGES = {
    "profiling.flops_profiler": {
        name: f"profiling.flops:{name}"
        for name in (
            *("FlopsProfiler", "bytes_to_string", "duration_to_string", "flops_to_string", "get_model_profile"),
            *("get_module_duration", "get_module_flops", "get_module_macs", "macs_to_string", "number_to_string"),
            "params_to_string",
        )
    },
    "runtime": {
        "DeepSpeedOptimizer": "zero.optimizer:DeepSpeedOptimizer",
        "ZeROOptimizer": "zero.optimizer:ZeroOptimizer",
    },
    "runtime.fp16.onebit": {
        "OnebitAdam": "optim.one_bit:OnebitAdam",
        "OnebitLamb": "optim.one_bit_lamb:OnebitLamb",
        "ZeroOneAdam": "optim.zero_one_adam:ZeroOneAdam",
    },
    "runtime.pipe": {
        "LayerSpec": "pipe.layers:LayerSpec",
        "PipelineModule": "pipe.module:PipelineModule",
        "ProcessTopology": "pipe.topology:ProcessTopology",
        "TiedLayerSpec": "pipe.layers:TiedLayerSpec",
    },
    "runtime.zero": {
        "GatheredParameters": "zero.gather:GatheredParameters",
        "Init": "zero.construct:Init",
        "MiCS_Init": "zero.construct:MiCS_Init",
        "TiledLinear": "zero.tiling:TiledLinear",
        "TiledLinearReturnBias": "zero.tiling:TiledLinearReturnBias",
        "ZeroParamStatus": "zero.param_marks:ZeroParamStatus",
        "register_external_parameter": "zero.gather:register_external_parameter",
        "unregister_external_parameter": "zero.gather:unregister_external_parameter",
        "unwrap_model_for_generation": "zero.gather:unwrap_model_for_generation",
    },
    "utils": {
        "OnDevice": "zero.construct:OnDevice",
        "RepeatingLoader": "data.loader:RepeatingLoader",
        "get_z3_leaf_modules": "zero.module_units:get_z3_leaf_modules",
        "log_dist": "log:log_dist",
        "logger": "log:logger",
        "safe_get_full_fp32_param": "zero.fragments:safe_get_full_fp32_param",
        "safe_get_full_grad": "zero.fragments:safe_get_full_grad",
        "safe_get_full_optimizer_state": "zero.fragments:safe_get_full_optimizer_state",
        "safe_get_local_fp32_param": "zero.fragments:safe_get_local_fp32_param",
        "safe_get_local_grad": "zero.fragments:safe_get_local_grad",
        "safe_get_local_optimizer_state": "zero.fragments:safe_get_local_optimizer_state",
        "safe_update_full_grad_vectorized": "zero.fragments:safe_update_full_grad_vectorized",
        "safe_set_full_fp32_param": "zero.fragments:safe_set_full_fp32_param",
        "safe_set_full_grad": "zero.fragments:safe_set_full_grad",
        "safe_set_full_optimizer_state": "zero.fragments:safe_set_full_optimizer_state",
        "safe_set_local_fp32_param": "zero.fragments:safe_set_local_fp32_param",
        "safe_set_local_grad": "zero.fragments:safe_set_local_grad",
        "safe_set_local_optimizer_state": "zero.fragments:safe_set_local_optimizer_state",
        "set_z3_leaf_module": "zero.module_units:set_z3_leaf_module",
        "set_z3_leaf_modules": "zero.module_units:set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name": "zero.module_units:set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix": "zero.module_units:set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules": "zero.module_units:unset_z3_leaf_modules",
        "z3_leaf_module": "zero.module_units:z3_leaf_module",
        "z3_leaf_parameter": "zero.module_units:z3_leaf_parameter",
    },
}
