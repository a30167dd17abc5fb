"""What this version does not have imports, can be named, subclassed and asked about, and refuses when it is used."""

import contextlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.compatibility import ENGINE_METHODS as ABSENT_METHODS
from deepspeed.compatibility import FEATURES, MODULES
from deepspeed.errors import ConfigError

# Scripts import these at the top and use them behind an option.
DOCUMENTED = """
    deepspeed.checkpoint:DeepSpeedCheckpoint
    deepspeed.module_inject.auto_tp:AutoTP
    deepspeed.module_inject:replace_transformer_layer
    deepspeed.ops.sparse_attention:SparseSelfAttention
    deepspeed.ops.transformer:DeepSpeedTransformerLayer
    deepspeed.sequence.fpdt_layer:FPDT_Attention
    deepspeed:DeepSpeedTransformerConfig
"""

GENERATORS = Path(__file__).parents[3] / "docs" / "generate"


def find(address):
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("address", DOCUMENTED.split())
def test_documented_names_import_and_refuse_when_used(address):
    thing = find(address)
    with pytest.raises(ConfigError, match=rf"{address.split(':')[1]}: .+ is not in this version of ds-core; .+"):
        thing()


@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_the_table_has_its_names(module):
    record = MODULES[module]
    assert record.feature in FEATURES
    for name in record.names():
        assert find(f"deepspeed.{module}:{name}").__name__ == name
    assert set(record.names()) <= set(dir(importlib.import_module(f"deepspeed.{module}")))


def test_importing_all_of_them_loads_no_torch():
    program = "import importlib, sys\nfrom deepspeed.compatibility import MODULES\n"
    program += "light = [name for name in MODULES if not name.startswith(('runtime', 'ops.', 'checkpoint.'))]\n"
    program += "for name in light: importlib.import_module('deepspeed.' + name)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_class_can_be_asked_about_and_subclassed():
    from deepspeed.module_inject.auto_tp import AutoTP

    model = torch.nn.Linear(2, 2)
    assert not isinstance(model, AutoTP)
    assert not issubclass(torch.nn.Linear, AutoTP)
    assert isinstance(AutoTP, type)

    class Mine(AutoTP, torch.nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"deepspeed\.module_inject.*AutoTP: a class for each part of AutoTP is"):
        Mine(8)


def test_a_name_is_one_object_wherever_it_is_imported_from():
    assert deepspeed.PipelineModule is deepspeed.pipe.PipelineModule is deepspeed.runtime.pipe.module.PipelineModule
    assert deepspeed.linear is importlib.import_module("deepspeed.linear")
    assert deepspeed.moe.layer is importlib.import_module("deepspeed.moe.layer")


def test_a_method_of_a_class_that_is_not_here_says_why():
    from deepspeed.module_inject.auto_tp import AutoTP

    with pytest.raises(AttributeError, match=r"tp_parser: a class for each part of AutoTP is not in this version"):
        AutoTP.tp_parser()


def test_errors_can_be_caught():
    from deepspeed.elasticity.config import ElasticityConfigError, ElasticityError

    assert issubclass(ElasticityConfigError, Exception)
    with pytest.raises(KeyError), contextlib.suppress(ElasticityConfigError, ElasticityError):
        raise KeyError("x")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'deepspeed\.moe\.mappings' has no attribute 'Nonsense'"):
        importlib.import_module("deepspeed.moe.mappings").Nonsense
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed.moe.nonsense")


def test_star_import():
    names = {}
    exec("from deepspeed.pipe import *", names)
    assert {"PipelineModule", "LayerSpec", "TiedLayerSpec"} <= set(names)


# ---- predicates answer, since the answer is known ---------------------------------------------------------------


def test_a_model_has_no_experts():
    from deepspeed.moe import utils

    model = torch.nn.Linear(2, 2)
    params = list(model.parameters())
    assert deepspeed.moe.utils.has_moe_layers(model) == (False, 0)
    assert not utils.is_moe_param(model.weight)
    assert not utils.is_moe_param_group({"params": params})
    shared, experts = utils.split_params_into_shared_and_expert_params(params)
    assert [id(param) for param in shared] == [id(param) for param in params]
    assert experts == []


@pytest.mark.parametrize("wrap", [list, tuple, lambda groups: groups[0]])
def test_parameter_groups_without_experts_stay_as_they_are(wrap):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    group = {"params": list(torch.nn.Linear(2, 2).parameters()), "lr": 0.1}
    (found,) = split(wrap([group]))
    assert found is group


def test_elasticity_is_enabled_or_not():
    assert deepspeed.elasticity.elasticity_enabled({}) is False
    assert deepspeed.elasticity.elasticity_enabled({"elasticity": {"enabled": True}}) is True


# ---- every public method of DeepSpeed's engine answers, or says what is missing -----------------------------------

ENGINE_METHODS = """
    all_gather_scalar allreduce_and_copy allreduce_and_scatter allreduce_bucket allreduce_gradients allreduce_no_retain
    amp_enabled amp_params autotp_size autotuning_enabled autotuning_end_profile_step autotuning_metric
    autotuning_metric_path autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step
    backward bfloat16_enabled bfloat16_master_weights_and_gradients buffered_allreduce_fallback
    checkpoint_tag_validation_enabled checkpoint_tag_validation_fail clip_fp32_gradients communication_data_type compile
    cpuadam_cores_perc curriculum_enabled_legacy curriculum_learning_config curriculum_learning_enabled
    curriculum_params_legacy data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled
    dataloader_drop_last deepspeed_io destroy disable_allgather dump_state dynamic_loss_scale dynamic_loss_scale_args
    eigenvalue_enabled eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num
    eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose elasticity_enabled
    empty_partition_cache eval flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth
    flops_profiler_output_file flops_profiler_profile_step flops_profiler_recompute_fwd_factor
    flops_profiler_top_modules forward fp16_auto_cast fp16_enabled fp16_master_weights_and_gradients get_batch_info
    get_data_types get_global_grad_norm get_lr get_mom get_pld_theta get_sequence_parallel_group get_type
    gradient_accumulation_steps gradient_clipping gradient_predivide_factor graph_harvesting initial_dynamic_scale
    is_compiled is_deepcompile_active is_deepcompile_enabled is_elastic_model_parallel_supported
    is_first_weights_partition_group is_gradient_accumulation_boundary is_iterable_style_dataset is_map_style_dataset
    launch_compile_passes load_checkpoint load_moe_state_dict load_module_state_dict load_universal_checkpoint
    loss_scale memory_breakdown mics_shard_size module_state_dict no_sync offload_states optimizer_legacy_fusion
    optimizer_name optimizer_params pld_enabled pld_gamma pld_params pld_theta postscale_gradients
    print_forward_breakdown quantize_training random_ltd_config random_ltd_enabled random_ltd_initialize
    register_compile_pass reload_states save_16bit_model save_checkpoint save_fp16_model scale scheduler_name
    scheduler_params set_custom_curriculum_learning_schedule set_data_post_process_func
    set_gradient_accumulation_boundary set_lr set_train_batch_size set_train_micro_batch_size sparse_all_gather
    sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain sparse_gradients_enabled step steps_per_print
    super_offload swap_tensor_config torch_autocast_dtype torch_autocast_enabled
    torch_autocast_lower_precision_safe_modules train train_batch_size train_micro_batch_size_per_gpu
    update_optimizer_step use_node_local_storage wall_clock_breakdown was_step_applied zero_allgather_bucket_size
    zero_allgather_partitions zero_allow_untested_optimizer zero_contiguous_gradients zero_cpu_offload
    zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save zero_grad
    zero_grad_hooks zero_has_nvme_offload zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1
    zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance
    zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
    zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_optimization
    zero_optimization_partition_gradients zero_optimization_partition_weights zero_optimization_stage
    zero_overlap_comm zero_param_persistence_threshold zero_partial_offload zero_prefetch_bucket_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_bucket_size
    zero_reduce_scatter zero_round_robin_gradients zero_sub_group_size zero_use_cpu_optimizer zeropp_loco_param
"""


@pytest.mark.parametrize("name", ENGINE_METHODS.split())
def test_every_engine_method_is_there_or_in_the_table(name):
    assert hasattr(deepspeed.DeepSpeedEngine, name) != (name in ABSENT_METHODS)


def test_what_is_said_of_rounding_in_training_names_what_there_is_now():
    advice = (
        "the section quantize_training of the configuration, and engine.compression_scheduler for compression_training"
    )
    with pytest.raises(AttributeError, match=advice):
        deepspeed.DeepSpeedEngine.quantize_training  # noqa: B018 - asked for what it says
    assert "deepspeed.runtime.eigenvalue.Eigenvalue" in FEATURES["eigenvalue"].instead


# ---- the table ----------------------------------------------------------------------------------------------------


def table():
    """The rows of the page, from the file beside its generator."""
    spec = importlib.util.spec_from_file_location("surface", GENERATORS / "surface.py")
    surface = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(surface)
    return surface.ROWS


ROWS = table()


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_address and row.state.name != "NOT_YET"])
def test_what_the_table_says_works_is_there(row):
    value = deepspeed
    for name in row.name.split(".")[1:]:
        if not hasattr(value, name):
            importlib.import_module(f"{value.__name__}.{name}")
        value = getattr(value, name)


def test_the_table_says_each_thing_once():
    names = [row.name for row in ROWS]
    assert sorted(set(names)) == sorted(names)
    assert all(row.sentence.endswith((".", ")")) for row in ROWS)
