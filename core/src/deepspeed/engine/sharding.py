"""Create the precision and the ZeRO stage that a configuration asks for.

`build.py` calls these functions once per engine. Only it and this file read the root of the configuration.
"""

import dataclasses
import sys
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.compression import asks_for_moq, asks_for_steps
from deepspeed.config.precision import torch_dtype
from deepspeed.config.training import LocalSGDConfig
from deepspeed.config.zero import ZeroConfig
from deepspeed.engine.determinism import refuse_undetermined
from deepspeed.errors import ConfigError
from deepspeed.optim import averages_in_step, is_elementwise, is_tested_with_zero
from deepspeed.parallel.mesh import Mesh
from deepspeed.plugins.manager import plugin_manager
from deepspeed.precision import BF16, FP16, Autocast, Precision
from deepspeed.precision.policy import DynamicLossScaler, LossScaler
from deepspeed.zero.module_units import Stage3Options
from deepspeed.zero.offload.policy import choose_shard_home
from deepspeed.zero.placement import Placement, ShardHome
from deepspeed.zero.quantized import ErrorFeedback
from deepspeed.zero.replicas import OuterSteps
from deepspeed.zero.sharding import Sharding
from deepspeed.zero.stages import STAGES, FixedOrder, LocalSteps, ZeroStage
from deepspeed.zero.unit_groups import ReplicationMode, UnitGroups
from deepspeed.zero.units import ShardingOptions


def split_data(mesh: Mesh, zero: ZeroConfig) -> Mesh:
    """Return the mesh, divided into the copies of the weights that MiCS or hpZ asks for."""
    asked = [("mics_shard_size", zero.mics_shard_size, 0), ("zero_hpz_partition_size", zero.zero_hpz_partition_size, 1)]
    given = [(name, size) for name, size, off in asked if size > off]
    if given and zero.stage != 3:
        raise ConfigError(
            f"zero_optimization.{given[0][0]}: found {given[0][1]} with stage {zero.stage}; it divides sharded "
            "parameters among ranks, so use stage 3, or omit it"
        )
    if len(given) > 1:
        raise ConfigError(
            f"zero_optimization: found {' and '.join(f'{name} {size}' for name, size in given)}; each divides the "
            "ranks into copies of the weights in its own way, give one of them"
        )
    for name, size in given:
        mesh = mesh.split_data(size, f"zero_optimization.{name}")
    return mesh


def copies_of_weights(zero: ZeroConfig, local_sgd: LocalSGDConfig) -> ReplicationMode:
    """Return which copies MiCS, hpZ or local SGD keeps among the data-parallel ranks."""
    if local_sgd.enabled:
        return ReplicationMode.RANKS
    if zero.mics_shard_size > 0:
        return ReplicationMode.MODEL
    return ReplicationMode.WEIGHTS if zero.zero_hpz_partition_size > 1 else ReplicationMode.NONE


def asked_dtypes(config: DeepSpeedConfig) -> dict[str, torch.dtype]:
    """Return the dtypes to train in besides fp32, by the key that asks for them."""
    asked = {
        "data_types.param_dtype": (config.data_types.param_dtype == "bf16", torch.bfloat16),
        "fp16.enabled": (config.fp16.enabled, torch.float16),
        "bf16.enabled": (config.bf16.enabled, torch.bfloat16),
        "torch_autocast.dtype": (config.torch_autocast.enabled, torch_dtype(config.torch_autocast.dtype)),
    }
    return {key: dtype for key, (is_enabled, dtype) in asked.items() if is_enabled}


def create_precision(config: DeepSpeedConfig, device: torch.device) -> Precision:
    """Create the policy that scales losses and casts weights."""
    clip_norm, param_dtype = config.gradient_clipping, config.data_types.param_dtype
    if param_dtype == "bf16" and not config.bf16.enabled:
        return BF16(clip_norm=clip_norm)
    if config.fp16.enabled:
        return FP16(_create_loss_scaler(config), clip_norm=clip_norm, auto_cast=config.fp16.auto_cast)
    if config.bf16.enabled:
        return BF16(clip_norm=clip_norm, checks_overflow=config.bf16.check_grad_overflow)
    if config.torch_autocast.enabled:
        dtype = torch_dtype(config.torch_autocast.dtype)
        scaler = _create_loss_scaler(config) if dtype == torch.float16 else None
        return Autocast(device.type, dtype, clip_norm=clip_norm, loss_scaler=scaler)
    return Precision(clip_norm=clip_norm)


def _create_loss_scaler(config: DeepSpeedConfig) -> LossScaler:
    fp16 = config.fp16
    if fp16.loss_scale > 0:
        return LossScaler(fp16.loss_scale)
    return DynamicLossScaler(
        2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        min_scale=fp16.min_loss_scale,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
    )


def create_sharding(
    config: DeepSpeedConfig,
    precision: Precision,
    optimizer: Optimizer | None,
    mesh: Mesh,
    units: UnitGroups,
    placement: Placement,
    shard_home: ShardHome | None,
    device: torch.device,
) -> Sharding:
    """Create the sharding of a ZeRO stage, not attached to the model yet.

    Raises:
        ConfigError: the optimizer was not tested with the stage, or keys exclude each other.
    """
    group, ranks = mesh.gradient_group(), units.dense.reduce_group
    zero = config.zero_optimization
    accumulation = config.data_types.grad_accum_dtype
    if accumulation not in (None, "fp32") and precision.model_dtype is None:
        raise ConfigError(
            f"data_types.grad_accum_dtype: found {accumulation!r} with fp32 parameters, whose gradients would be "
            'rounded; use "fp32", or enable bf16 or fp16'
        )
    wire = config.communication_data_type
    stage = _choose_stage(zero, optimizer, mesh, units)
    if config.local_sgd.enabled and optimizer is not None:
        if averages_in_step(optimizer):
            raise ConfigError(
                f"local_sgd.enabled: found true with {type(optimizer).__name__}, which averages momenta over the ranks "
                "in its steps; use AdamW, or local_sgd.enabled false"
            )
        stage = LocalSteps(0, outer=OuterSteps(config.local_sgd, comm.group_backend(group)))
    if config.deterministic.enabled:
        stage = FixedOrder.of(stage, ranks.world_size)
        accumulation = "fp32" if precision.model_dtype is not None else None  # else gradients add up in their own dtype
    options = ShardingOptions(
        stage=stage,
        model_dtype=precision.model_dtype,
        accumulation_dtype=torch_dtype(accumulation) if accumulation is not None else None,
        wire_dtype=torch_dtype(wire) if wire is not None else None,
        bucket_numel=zero.reduce_bucket_size,
        sub_group_numel=zero.sub_group_size or sys.maxsize,
        overlap=zero.overlap_comm,
        predivide_factor=_predivide_factor(config),
        allows_unused=zero.ignore_unused_parameters,
        placement=placement if optimizer is not None else Placement(),
        groups=units,
        model_ranks=tuple(comm.group_backend(mesh.group(axis)) for axis in ("tp", "pp") if mesh.size(axis) > 1),
        counts_replicated=mesh.size("tp") == 1 or mesh.rank("tp") == 0,
        device=device,
        partitioning=_stage3_options(zero, shard_home),
    )
    for each in options.model_ranks:
        each.connect()
    if optimizer is None and zero.stage < 3:
        return Sharding(options, ranks, group)
    is_tested = optimizer is None or zero.stage == 0 or is_tested_with_zero(optimizer)
    # `ZeroStage.refuse_not_elementwise` refuses it, whatever is allowed
    is_refused = zero.stage == 3 and not is_elementwise(optimizer)
    if not is_tested and not is_refused and not config.zero_allow_untested_optimizer:
        raise ConfigError(
            f"optimizer: found {type(optimizer).__name__} with zero_optimization.stage {zero.stage}, which was not "
            'tested together; set "zero_allow_untested_optimizer": true to use it, or stage 0'
        )
    of_plugin: Callable[..., Sharding] | None = plugin_manager().hook.ds_sharding(name=str(zero.stage))
    return (of_plugin or Sharding)(options, ranks, group)


def _choose_stage(zero: ZeroConfig, optimizer: Optimizer | None, mesh: Mesh, units: UnitGroups) -> ZeroStage:
    if optimizer is not None and averages_in_step(optimizer):
        from deepspeed.zero.stages import stage_of  # late: few runs ask for it

        return stage_of(optimizer, zero.stage, mesh, units)
    stage = STAGES[0 if optimizer is None and zero.stage < 3 else zero.stage]
    if not zero.zero_quantized_gradients:
        return stage
    loco = zero.zeropp_loco_param
    feedback = ErrorFeedback(loco.err_beta, loco.reset_steps) if loco is not None else None
    return dataclasses.replace(stage, quantizes_gradients=True, feedback=feedback)


def create_shard_home(config: DeepSpeedConfig, device: torch.device) -> ShardHome | None:
    """Choose where shards of parameters live between uses; return None if they live on the device."""
    zero = config.zero_optimization
    keeps_int8 = zero.zero_quantized_nontrainable_weights
    return choose_shard_home(zero.offload_param, config.aio, device=device, stage=zero.stage, keeps_int8=keeps_int8)


def _stage3_options(zero: ZeroConfig, home: ShardHome | None) -> Stage3Options:
    return Stage3Options(
        prefetch_numel=zero.prefetch_bucket_size,
        max_live_numel=zero.max_live_parameters,
        max_reuse_numel=zero.max_reuse_distance,
        persistence_numel=zero.param_persistence_threshold,
        model_persistence_numel=zero.model_persistence_threshold,
        min_granularity=zero.module_granularity_threshold,
        quantizes_weights=zero.zero_quantized_weights,
        keeps_frozen_in_int8=zero.zero_quantized_nontrainable_weights,
        checks_values=zero.enable_sanity_checks,
        home=home,
    )


def refuse_keys(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Refuse keys that the stage cannot use, or that `local_sgd` or `deterministic` rules out."""
    _refuse_quantized(config.zero_optimization)
    if config.local_sgd.enabled:
        _refuse_with_local_sgd(config, mesh)
    if config.deterministic.enabled:
        _refuse_undetermined_keys(config)


def _refuse_with_local_sgd(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Refuse what divides a model or compares its copies, where each rank trains a copy of its own."""
    stage, every = config.zero_optimization.stage, config.watch.compare_weights_every
    if stage > 0:
        raise ConfigError(
            f"local_sgd.enabled: found true with zero_optimization.stage {stage}, which divides states of one model "
            "among the ranks, where each rank trains a copy of its own between two averages; set stage to 0, or "
            "local_sgd.enabled to false"
        )
    if divided := [f"{axis} {mesh.size(axis)}" for axis in ("pp", "sp", "tp") if mesh.size(axis) > 1]:
        raise ConfigError(
            f"local_sgd.enabled: found true with {', '.join(divided)} in the mesh, whose ranks make each step "
            "together; divide the data alone, or set local_sgd.enabled to false"
        )
    if every or config.zero_optimization.enable_sanity_checks:
        name = f"watch.compare_weights_every {every}" if every else "zero_optimization.enable_sanity_checks true"
        raise ConfigError(
            f"local_sgd.enabled: found true with {name}, and the copies differ between two averages; omit that key, or "
            "set local_sgd.enabled to false"
        )
    if asks_for_moq(config):
        raise ConfigError(
            "local_sgd.enabled: found true with quantize_training, whose rounded weights an average undoes; omit that "
            "section, or set local_sgd.enabled to false"
        )


def _refuse_undetermined_keys(config: DeepSpeedConfig) -> None:
    zero, efficiency = config.zero_optimization, config.data_efficiency
    rounds = "which rounds in blocks that another number of ranks cuts elsewhere"
    given = {
        "zero_optimization.zero_quantized_weights": (zero.zero_quantized_weights, rounds),
        "zero_optimization.zero_quantized_gradients": (zero.zero_quantized_gradients, rounds),
        "zero_optimization.zero_quantized_nontrainable_weights": (zero.zero_quantized_nontrainable_weights, rounds),
        "zero_optimization.mics_shard_size": (zero.mics_shard_size > 0, "whose copies are summed after the steps"),
        "communication_data_type": (
            config.communication_data_type not in (None, "fp32"),
            "which rounds gradients that cross, and one rank sends none",
        ),
        "data_types.grad_accum_dtype": (
            config.data_types.grad_accum_dtype not in (None, "fp32"),
            "and sums in one order are made in fp32",
        ),
        "gradient_predivide_factor": (
            _predivide_factor(config) is not None,
            "and gradients are divided by the number of ranks, which rounds nothing",
        ),
        "compression_training": (asks_for_steps(config.compression_training), "whose ranges are those of one rank"),
        "local_sgd": (config.local_sgd.enabled, "whose ranks make steps of their own"),
        "quantize_training": (asks_for_moq(config), "whose periods follow the losses of one rank"),
        "data_efficiency.data_sampling": (
            efficiency.asks_for_curriculum() or efficiency.asks_for_dynamic_batching(),
            "whose batches follow from the number of ranks",
        ),
    }
    for name, (is_given, reason) in given.items():
        if is_given:
            refuse_undetermined(f"the key {name}", reason, "leave it out")


def _refuse_quantized(zero: ZeroConfig) -> None:
    """Refuse keys of ZeRO++ that the stage cannot use: only stage 3 gathers weights for modules, and stage 0 needs
    whole sums on every rank."""
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(zero, name) and zero.stage < 3:
            raise ConfigError(
                f"zero_optimization.{name}: found true with zero_optimization.stage {zero.stage}, where every rank "
                f"holds whole weights; set stage to 3, or {name} to false"
            )
    if zero.zero_quantized_gradients and zero.stage == 0:
        raise ConfigError(
            "zero_optimization.zero_quantized_gradients: found true with zero_optimization.stage 0, where every rank "
            "needs whole sums, which would be sent back in full; set stage to 1, where a rank needs those of its shard "
            "alone, or zero_quantized_gradients to false"
        )
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        raise ConfigError(
            "zero_optimization.zeropp_loco_param: found it with zero_quantized_gradients false, where gradients are "
            "sent as they are and leave no error to make up for; set zero_quantized_gradients to true, or omit it"
        )


def _predivide_factor(config: DeepSpeedConfig) -> float | None:
    """Return the number by which gradients are divided before the sum.

    None: gradients are divided by the number of ranks before the sum, and by nothing after it.
    """
    factor = config.gradient_predivide_factor
    return None if config.prescale_gradients or factor == 1.0 else factor
