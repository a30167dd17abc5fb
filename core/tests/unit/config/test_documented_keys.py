"""No key that DeepSpeed documents, or that the libraries around it write, is an unknown key."""

import pytest
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import json_keys, section_of

# https://www.deepspeed.ai/docs/config-json, its tutorials, and the configs of Hugging Face, Lightning and Megatron.
DOCUMENTED = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "optimizer scheduler communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor "
    "sparse_gradients fp16 bf16 bfloat16 amp torch_autocast gradient_clipping zero_optimization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio tensor_parallel expert_parallel hybrid_engine "
    "disable_python_gc steps_per_print wall_clock_breakdown dump_state memory_breakdown autotuning flops_profiler "
    "activation_checkpointing sparse_attention data_efficiency curriculum_learning tensorboard wandb comet "
    "csv_monitor comms_logger compression_training checkpoint data_types elasticity compile pipeline timers nebula "
    "progressive_layer_drop eigenvalue quantize_training inference dataloader_drop_last disable_allgather "
    "fp32_allreduce seq_parallel_communication_data_type sequence_parallel_size data_parallel_size vocabulary_size "
    "use_data_before_expert_parallel_ graph_harvesting weight_quantization pld",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow immediate_grad_update",
    "amp": "enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale "
    "cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "zero_optimization": "stage allgather_partitions allgather_bucket_size compute_grad_norm overlap_comm "
    "reduce_scatter reduce_bucket_size contiguous_gradients load_from_fp32_weights round_robin_gradients "
    "parameter_alignment offload_param offload_optimizer stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "sub_group_size elastic_checkpoint stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold ignore_unused_parameters "
    "stage3_use_all_reduce_for_fetch_params zero_hpz_partition_size zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param log_trace_cache_warnings "
    "cpu_offload cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory prefetch_bucket_size "
    "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
    "gather_16bit_weights_on_model_save legacy_stage1 grad_hooks use_multi_rank_bucket_allreduce mics_shard_size "
    "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "leaf_module zenflow save_muon_momentum_buffer_in_memory",
    "zero_optimization.offload_param": "device nvme_path pin_memory buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory ratio buffer_count fast_init pipeline_read "
    "pipeline_write",
    "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
    "tensor_parallel": "autotp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config "
    "tensor_parallel tp dtype injection_policy_tuple keep_module_on_host",
    "hybrid_engine": "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
    "tp_gather_partition_size enable_cuda_graph",
    "expert_parallel": "enabled autoep_size expert_tensor_parallel_size async_split_plan preset_model use_grouped_mm "
    "disable_triton_grouped_mm moe_layer_pattern router_pattern expert_pattern score_func score_apply combine_impl "
    "comm_backend route_norm route_scale top_k routed_scaling_factor num_expert_groups num_limited_groups "
    "load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts "
    "shared_experts_pattern",
    "autotuning": "enabled results_dir exps_dir overwrite metric metric_path start_profile_step end_profile_step fast "
    "min_train_batch_size max_train_batch_size mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping "
    "tuner_num_trials arg_mappings num_nodes num_gpus model_info model_info_path min_train_micro_batch_size_per_gpu "
    "max_train_micro_batch_size_per_gpu",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization "
    "number_checkpoints synchronize_checkpoint_boundary profile",
    "data_efficiency": "enabled seed data_routing data_sampling",
    "curriculum_learning": "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
    "csv_monitor": "enabled output_path job_name",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "compression_training": "layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning "
    "head_pruning channel_pruning",
    "compression_training.layer_reduction": "enabled keep_number_layer module_name_prefix teacher_layer "
    "other_module_name",
    "compression_training.weight_quantization.shared_parameters": "enabled quantizer_kernel schedule_offset "
    "quantize_groups quantize_verbose quantization_type rounding quantize_weight_in_forward fp16_mixed_quantize",
    "compression_training.activation_quantization.shared_parameters": "enabled quantization_type range_calibration "
    "schedule_offset",
    "compression_training.sparse_pruning.shared_parameters": "enabled schedule_offset schedule_offset_end "
    "schedule_offset_stride method block_pattern dense_ratio excluded_modules",
    "compression_training.head_pruning.shared_parameters": "enabled schedule_offset method num_heads",
    "compression_training.row_pruning.shared_parameters": "enabled schedule_offset method",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write writer checkpoint_serialization",
    "checkpoint.parallel_write": "pipeline_stage",
    "compile": "deepcompile passes offload_activation offload_activation_pin_memory enabled backend kwargs",
    "data_types": "grad_accum_dtype",
    "elasticity": "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version "
    "prefer_larger_batch ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    "timers": "throughput",
    "timers.throughput": "enabled synchronized",
    "nebula": "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention "
    "enable_nebula_load load_path",
    "progressive_layer_drop": "enabled theta gamma",
    "eigenvalue": "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
}


def _section(path):
    model = DeepSpeedConfig
    for name in filter(None, path.split(".")):
        model = section_of(model.model_fields[json_keys(model)[name]])
    return model


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_keys_are_known(path):
    model = _section(path)
    assert [name for name in DOCUMENTED[path].split() if name not in json_keys(model) and name not in model.moved] == []
