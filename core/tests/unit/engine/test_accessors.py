"""The table of getters: each is a method of the engine and gives the right answer."""

import pytest
import torch
from deepspeed.compatibility import ENGINE_METHODS
from deepspeed.config.parallel import TensorParallelConfig
from deepspeed.engine.accessors import ATTRIBUTES, FROM_CONFIG, FROM_ENGINE
from deepspeed.errors import AbsentMemberError
from torch import nn

CONFIG = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.7,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "steps_per_print": 50,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "fp16": {"enabled": True, "initial_scale_power": 5, "auto_cast": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 1000,
        "reduce_bucket_size": 2000,
        "overlap_comm": True,
    },
}

ANSWERS = {
    **dict.fromkeys(("get_data_parallel_rank", "get_model_parallel_rank", "get_tensor_parallel_rank"), 0),
    **dict.fromkeys(("bf16_master_weights_and_gradients", "bf16_optimizer_states", "is_sanity_checks_enabled"), False),
    **dict.fromkeys(("zero_allgather_sequential", "zero_parameter_alignment"), False),
    **{"zero_save_muon_momentum_buffer_in_memory": False, "zero_compute_grad_norm": True},
    **{"checkpoint_serialization_enabled": True, "log_level": None, "zenflow_config": None},
    "tensor_parallel_config": TensorParallelConfig(),
    "aio_config": {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    },
    "amp_enabled": False,
    "amp_params": False,
    "autotp_size": 0,
    "autotuning_enabled": False,
    "autotuning_end_profile_step": 5,
    "autotuning_metric": "throughput",
    "autotuning_metric_path": None,
    "autotuning_model_info_path": None,
    "autotuning_profile_model_info": False,
    "autotuning_start_profile_step": 3,
    "bfloat16_enabled": False,
    "bfloat16_master_weights_and_gradients": False,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": False,
    "cpuadam_cores_perc": 0.8,
    "curriculum_enabled_legacy": False,
    "curriculum_learning_config": {"enabled": False, "curriculum_metrics": {}},
    "curriculum_learning_enabled": False,
    "curriculum_params_legacy": {},
    "data_efficiency_config": {},
    "data_efficiency_enabled": False,
    "data_sampling_config": {
        "enabled": False,
        "num_epochs": 1000,
        "num_workers": 0,
        "pin_memory": False,
        "curriculum_learning": {"enabled": False, "curriculum_metrics": {}},
        "dynamic_batching": {
            "enabled": False,
            "lr_scaling_method": "linear",
            "min_batch_size": 1,
            "sequence_picking_order": "dataloader",
            "verbose": False,
        },
    },
    "data_sampling_enabled": False,
    "dataloader_drop_last": False,
    "disable_allgather": False,
    "dump_state": False,
    "dynamic_loss_scale": True,
    "dynamic_loss_scale_args": {
        "init_scale": 32.0,
        "scale_window": 1000,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
        "min_scale": 1.0,
    },
    "eigenvalue_enabled": False,
    "eigenvalue_gas_boundary_resolution": 1,
    "eigenvalue_layer_name": "bert.encoder.layer",
    "eigenvalue_layer_num": 0,
    "eigenvalue_max_iter": 100,
    "eigenvalue_stability": 1e-06,
    "eigenvalue_tol": 0.01,
    "eigenvalue_verbose": False,
    "elasticity_enabled": False,
    "empty_partition_cache": None,
    "flops_profiler_detailed": True,
    "flops_profiler_enabled": False,
    "flops_profiler_module_depth": -1,
    "flops_profiler_output_file": None,
    "flops_profiler_profile_step": 1,
    "flops_profiler_recompute_fwd_factor": 0.0,
    "flops_profiler_top_modules": 1,
    "fp16_auto_cast": True,
    "fp16_enabled": True,
    "fp16_master_weights_and_gradients": False,
    "get_batch_info": (6, 2, 3),
    "get_data_types": (torch.float16, torch.float16),
    "get_global_grad_norm": None,
    "get_pld_theta": None,
    "get_sequence_parallel_group": None,
    "get_type": [],
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.7,
    "gradient_predivide_factor": 2.0,
    "graph_harvesting": False,
    "initial_dynamic_scale": 32.0,
    "initial_scale_power": 5,
    "is_deepcompile_active": False,
    "is_deepcompile_enabled": False,
    "is_elastic_model_parallel_supported": False,
    "is_first_weights_partition_group": False,
    "is_gradient_accumulation_boundary": False,
    "load_universal_checkpoint": False,
    "loss_scale": 32.0,
    "managed_gradient_accumulation": True,
    "memory_breakdown": False,
    "mics_shard_size": -1,
    "optimizer_legacy_fusion": False,
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.5},
    "pld_enabled": False,
    "pld_gamma": 0.001,
    "pld_params": False,
    "pld_theta": 1.0,
    "postscale_gradients": False,
    "random_ltd_config": {
        "enabled": False,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {},
        "layer_token_lr_schedule": {},
    },
    "random_ltd_enabled": False,
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 4},
    "sparse_gradients_enabled": False,
    "steps_per_print": 50,
    "super_offload": False,
    "swap_tensor_config": {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    },
    "torch_autocast_dtype": torch.bfloat16,
    "torch_autocast_enabled": False,
    "torch_autocast_lower_precision_safe_modules": [
        "torch.nn.Linear",
        "torch.nn.Conv1d",
        "torch.nn.Conv2d",
        "torch.nn.Conv3d",
    ],
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 2,
    "use_node_local_storage": False,
    "wall_clock_breakdown": False,
    "was_step_applied": False,
    "zero_allgather_bucket_size": 1000,
    "zero_allgather_partitions": True,
    "zero_allow_untested_optimizer": False,
    "zero_contiguous_gradients": True,
    "zero_cpu_offload": False,
    "zero_elastic_checkpoint": False,
    "zero_force_ds_cpu_optimizer": True,
    "zero_gather_16bit_weights_on_model_save": False,
    "zero_grad_hooks": True,
    "zero_has_nvme_offload": False,
    "zero_hpz_partition_size": 1,
    "zero_ignore_unused_parameters": True,
    "zero_legacy_stage1": False,
    "zero_load_from_fp32_weights": True,
    "zero_log_trace_cache_warnings": False,
    "zero_max_live_parameters": 1000000000,
    "zero_max_reuse_distance": 1000000000,
    "zero_model_persistence_threshold": 9223372036854775807,
    "zero_module_granularity_threshold": 0,
    "zero_multi_rank_bucket_allreduce": True,
    "zero_nvme_offload_optimizer": False,
    "zero_offload_optimizer": None,
    "zero_offload_param": None,
    "zero_optimization": True,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": False,
    "zero_optimization_stage": 2,
    "zero_overlap_comm": True,
    "zero_param_persistence_threshold": 100000,
    "zero_partial_offload": 1.0,
    "zero_prefetch_bucket_size": 50000000,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_weights": False,
    "zero_reduce_bucket_size": 2000,
    "zero_reduce_scatter": True,
    "zero_round_robin_gradients": False,
    "zero_sub_group_size": 1_000_000_000,
    "zero_use_cpu_optimizer": False,
    "zeropp_loco_param": None,
}


def test_the_answers_here_are_all_of_the_table():
    assert set(ANSWERS) == {*FROM_CONFIG, *FROM_ENGINE}
    tables = [FROM_CONFIG, FROM_ENGINE, ATTRIBUTES, ENGINE_METHODS]
    assert len({name for table in tables for name in table}) == sum(map(len, tables))


def test_every_getter_answers(make_engine):
    engine = make_engine(nn.Linear(4, 2), **CONFIG)
    assert {name: getattr(engine, name)() for name in ANSWERS} == ANSWERS


def test_offload_is_told_from_the_section(make_engine):
    engine = make_engine(nn.Linear(4, 2), zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_cpu_offload()
    assert engine.zero_use_cpu_optimizer()


def test_error_feedback_is_told_as_deepspeed_tells_it(make_engine):
    zero = {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"reset_T": 5}}
    engine = make_engine(nn.Linear(4, 2), zero_optimization=zero)
    assert engine.zeropp_loco_param() == {"err_beta": 0.8, "reset_T": 5}


def test_data_types_and_scale_without_fp16(make_engine):
    engine = make_engine(nn.Linear(4, 2))
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert engine.dynamic_loss_scale_args() is None


def test_kinds_of_datasets(make_engine):
    engine = make_engine(nn.Linear(4, 2))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([1])

    mapped, iterable = torch.utils.data.TensorDataset(torch.ones(1)), Stream()
    assert [engine.is_map_style_dataset(each) for each in (mapped, iterable)] == [True, False]
    assert [engine.is_iterable_style_dataset(each) for each in (mapped, iterable)] == [False, True]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_questions_about_the_stage(make_engine, stage):
    engine = make_engine(nn.Linear(4, 2), zero_optimization={"stage": stage})
    assert engine.zero_optimization_stage() == stage
    assert engine.zero_optimization() is (stage > 0)
    assert engine.zero_optimization_partition_gradients() is (stage == 2)


def test_what_a_step_leaves_behind(make_engine):
    engine = make_engine(nn.Linear(4, 2), train_batch_size=1)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.was_step_applied() is True
    assert engine.get_global_grad_norm() == pytest.approx(10**0.5)
    assert engine.is_gradient_accumulation_boundary() is True


def test_a_step_between_boundaries_is_not_applied(make_engine):
    engine = make_engine(nn.Linear(4, 2), train_batch_size=2, gradient_accumulation_steps=2)
    applied = []
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]


def test_they_have_names_and_docstrings(make_engine):
    assert make_engine(nn.Linear(4, 2)).train_batch_size.__name__ == "train_batch_size"
    assert "gradient_clipping" in make_engine(nn.Linear(4, 2)).gradient_clipping.__doc__


def test_attributes(make_engine, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    data, module = [1, 2], nn.Linear(4, 2)
    engine = make_engine(module, arguments={"training_data": data})
    found = {name: getattr(engine, name) for name in ATTRIBUTES}
    assert found == {
        "client_lr_scheduler": None,
        "client_optimizer": None,
        "communication_data_type": torch.float32,
        "compression_scheduler": None,
        "curriculum_scheduler_legacy": None,
        "data_parallel_group": engine.mesh.group("dp"),
        "dp_world_size": 1,
        "flops_profiler": None,
        "global_rank": 0,
        "has_moe_layers": False,
        "local_rank": 0,
        "moe_layers": [],
        "mp_world_size": 1,
        "mpu": None,
        "num_experts": [],
        "param_names": {module.weight: "weight", module.bias: "bias"},
        "pipeline_parallelism": False,
        "progressive_layer_drop": None,
        "random_ltd_scheduler": None,
        "seq_parallel_group": None,
        "seq_data_parallel_group": engine.mesh.group("dp", "sp"),
        "seq_dp_world_size": 1,
        "sequence_parallel_size": 1,
        "training_data": data,
        "world_size": 1,
    }


def test_attributes_are_what_initialize_was_given(make_engine):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    engine = make_engine(model, arguments={"optimizer": optimizer, "lr_scheduler": schedule})
    assert engine.client_optimizer is optimizer
    assert engine.client_lr_scheduler is schedule
    engine.destroy()
    assert engine.client_optimizer is None


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, torch.float32),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, torch.float16),
    ],
)
def test_the_dtype_of_exchanged_gradients(make_engine, keys, dtype):
    assert make_engine(nn.Linear(4, 2), **keys).communication_data_type == dtype


@pytest.mark.parametrize("name", ENGINE_METHODS)
def test_what_is_documented_elsewhere_and_not_here(make_engine, name):
    engine = make_engine(nn.Linear(4, 2))
    with pytest.raises(AttributeError, match=rf"^{name}: .* not in this version of ds-core; ."):
        getattr(engine, name)
    engine.module.register_buffer(name, torch.ones(1), persistent=False)
    assert torch.equal(getattr(engine, name), torch.ones(1)), "the module's own comes first"


def test_a_loop_that_reduces_gradients_itself_is_told(make_engine):
    engine = make_engine(nn.Linear(4, 2))
    engine.enable_backward_allreduce = True
    with pytest.raises(ValueError, match=r"enable_backward_allreduce = False: .* engine.no_sync\(\)"):
        engine.enable_backward_allreduce = False
    assert engine.enable_backward_allreduce


def test_an_attribute_of_deepspeeds_engine_says_why_it_is_not_here(make_engine):
    engine = make_engine(nn.Linear(4, 2), zero_optimization={"stage": 1})
    with pytest.raises(AbsentMemberError, match="losses: this member of DeepSpeed's DeepSpeedEngine .* engine.config"):
        _ = engine.losses
    with pytest.raises(AbsentMemberError, match=r"bit16_groups: .* engine.sharding;"):
        _ = engine.optimizer.bit16_groups
    engine.module.losses = [1.0]
    assert engine.losses == [1.0], "the module's own comes first"
