"""`deepspeed.initialize`: configuration -> parts -> engine, in reading order. The only reader of the config root."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import Dataset

from deepspeed import comm, log
from deepspeed._installation import foreign_deepspeed, foreign_files_warning
from deepspeed.checkpoint import Checkpointer, create_store
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.model_ranks import Division, Experts
from deepspeed.comm.arrivals import Arrivals
from deepspeed.comm.values import all_gather_values
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.precision import torch_dtype
from deepspeed.config.read import ConfigSource
from deepspeed.config.zero import ZeroConfig
from deepspeed.engine.accessors import read_answers
from deepspeed.engine.device import check_dtypes, claim_device, local_rank
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.events import notify
from deepspeed.engine.hybrid import DeepSpeedHybridEngine
from deepspeed.engine.observers import Observers, ranks_of_table
from deepspeed.engine.optimizers import (
    OptimizerLike,
    Parameters,
    SchedulerLike,
    choose_optimizer,
    choose_scheduler,
    trainable,
)
from deepspeed.engine.pipeline import PipelineEngine, mesh_of_pipeline
from deepspeed.engine.saving import Saving
from deepspeed.engine.schedule import Accumulation
from deepspeed.engine.start_line import start_line
from deepspeed.engine.training import Training
from deepspeed.engine.training_state import TrainingState
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.moe.divide import divide_experts
from deepspeed.moe.layer import connect_moe_layers
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.optim import is_elementwise, is_tested_with_zero
from deepspeed.parallel import groups
from deepspeed.parallel.expert_params import expert_group_of, expert_sizes
from deepspeed.parallel.layout import merge_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import division_is_known, parts_held
from deepspeed.pipe.module import PipelineModule
from deepspeed.plugins.manager import plugin_manager
from deepspeed.precision import BF16, FP16, Autocast, Precision
from deepspeed.precision.buffers import cast_buffers
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.precision.policy import cast_floating
from deepspeed.profiling.breakdown import Breakdown
from deepspeed.profiling.throughput import ThroughputTimer
from deepspeed.tensor_parallel.entry import divide_expert, divide_over, prepare_params
from deepspeed.uncaught import report_to_launcher
from deepspeed.zero.agreement import check_same
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.leaf_modules import mark_configured
from deepspeed.zero.managed import refuse_managed, refuse_meta, refuse_sharded
from deepspeed.zero.module_units import Stage3Options
from deepspeed.zero.offload.policy import asks_for_host, choose_placement, choose_shard_home
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.param_unit import unit_of
from deepspeed.zero.placement import Placement
from deepspeed.zero.replicas import check_replicas
from deepspeed.zero.shard_home import ShardHome
from deepspeed.zero.stage0 import Stage0
from deepspeed.zero.stage1 import Stage1
from deepspeed.zero.stage2 import Stage2
from deepspeed.zero.stage3 import Stage3
from deepspeed.zero.strategy import Sharding
from deepspeed.zero.synchronize import synchronize_module, synchronize_tied
from deepspeed.zero.unit_groups import Copies, UnitGroups, unit_groups

_STEPS_PER_TABLE = 10  # of `wall_clock_breakdown` and `memory_breakdown`, where `steps_per_print` does not say it


def initialize(
    args: argparse.Namespace | None = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerLike | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Optimizer | None, Any, Any]:
    """Wrap a model into an engine.

    Args:
        args: may carry `deepspeed_config` (a path), `local_rank` or `device_rank`.
        model: the module; moved to this rank's device.
        optimizer: a torch optimizer, or a callable that gets the parameters; beats the config's.
        model_parameters: what the optimizer updates, parameters or groups of them; default: all that train.
        training_data: a dataset, for which a distributed loader is made.
        lr_scheduler: a scheduler, or a callable that gets the optimizer; beats the config's.
        distributed_port: of the rendezvous, when this call starts torch.distributed without a launcher.
        mpu: an object with `get_data_parallel_group()`, `..._world_size()` and `..._rank()`, and the same for
            tensor, pipeline or sequence parallelism, if the caller made the groups and divides the model itself.
        dist_init_required: False if torch.distributed was initialized by the caller.
        collate_fn: for the loader.
        config: path, dict, JSON, hjson or base64; `config_params` is its older name.
        mesh_param: sizes (data parallel, sequence parallel), or a mapping of axes ("dp", "sp", "tp", "pp") to sizes,
            which multiply to the number of ranks. Gradients are averaged over dp x sp; the caller divides the model,
            unless the configuration has `tensor_parallel.autotp_size`.

    Returns:
        engine, optimizer, training dataloader, learning rate scheduler; None for each that is absent.

    Raises:
        ConfigError: names the key or argument, what was found and what is allowed. Also for a parameter that another
            engine trains, until that engine's `destroy()`, and on every rank if ranks differ in model, optimizer or
            configuration.
    """
    report_to_launcher()
    if (version := foreign_deepspeed()) is not None:
        warn_once(foreign_files_warning(version))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"initialize: model is {type(model).__name__}; pass a torch.nn.Module")
    refuse_meta(chain(model.named_parameters(), model.named_buffers()), "initialize")
    source = _config_source(args, config, config_params)
    settings = DeepSpeedConfig(source, batch_required=False)
    if settings.log_level is not None:
        log.logger.setLevel(settings.log_level)
    settings.check_supported()
    _start_communication(dist_init_required, distributed_port)
    if isinstance(model, PipelineModule):
        mesh = mesh_of_pipeline(model, mpu, mesh_param, _asked_sizes(settings))
    else:
        mesh = groups.create_mesh(mpu, mesh_param, _asked_sizes(settings))
    _count_samples_once(settings, mesh)
    settings.resolve_batch(mesh.size("dp"))
    _check_same(settings, mesh)
    mesh = _split_data(mesh, settings.zero_optimization)
    mesh.data_before_expert = settings.use_data_before_expert_parallelism
    group = mesh.gradient_group()
    groups.view(mesh)
    plugin_manager().hook.ds_check_config(config=settings)
    if settings.expert_parallel.enabled:
        divide_experts(model, mesh, settings.expert_parallel)
    device = claim_device(args)
    check_dtypes(_asked_dtypes(settings))
    if "comms_logger" in settings.model_fields_set:
        comm.configure(settings)

    zero = settings.zero_optimization
    shard_home = _choose_shard_home(settings, device)
    _refuse_quantized(zero)
    if settings.tensor_parallel.size > 1:
        divide_over(model, mesh, settings.tensor_parallel)
    module = _move(model, device, zero.stage)
    prepare_params(module)
    precision = _create_precision(settings, device)
    placement = choose_placement(
        zero.offload_optimizer,
        stage=zero.stage,
        device=device,
        home=shard_home,
        aio=settings.aio,
        rank=comm.get_rank(),
    )
    basic_optimizer = choose_optimizer(
        settings.optimizer,
        optimizer,
        trainable(module, model_parameters),
        module,
        on_host=asks_for_host(zero.offload_optimizer),
        forces_host=settings.zero_force_ds_cpu_optimizer,
        unresolved=settings.unresolved_auto(),
    )
    weights_dtype = torch_dtype(settings.weights_dtype) if settings.weights_dtype is not None else None
    refuse_managed(module, basic_optimizer, weights_dtype)
    _refuse_of_parts(module, basic_optimizer)
    refuse_sharded(module, zero.stage)
    if settings.data_types.param_dtype == "fp32":
        cast_floating((param for param in module.parameters() if unit_of(param) is None), torch.float32)
    leaf = zero.leaf_module
    mark_configured(module, leaf.classes, leaf.names, leaf.name_suffixes)
    units = unit_groups(mesh, module, _copies(zero))
    connect_moe_layers(module, mesh, divide_expert)
    sharding = _create_sharding(settings, precision, basic_optimizer, mesh, units, placement, shard_home, device)
    schedule = Accumulation(settings.gradient_accumulation_steps)
    experts = {name: mesh.gradient_group(size) for name, size in expert_sizes(module).items()}
    training = Training(
        sharding=sharding,
        precision=precision,
        schedule=schedule,
        observers=_create_observers(settings, group, scales_loss=precision.loss_scaler.is_dynamic),
        basic_optimizer=basic_optimizer,
        train_batch_size=int(settings.train_batch_size),
        check=partial(check_replicas, module, group, experts) if zero.enable_sanity_checks else None,
    )
    synchronize_module(module, group, experts)
    synchronize_tied(module, units)
    sharding.attach(
        module,
        basic_optimizer,
        training.plan_backward,
        training.gradients_were_dropped,
        is_elementwise=basic_optimizer is None or is_elementwise(basic_optimizer),
    )
    precision.cast_params(module)
    types = settings.data_types
    buffer_dtype = torch_dtype(types.buffer_dtype) if types.buffer_dtype is not None else None
    cast_buffers(module, buffer_dtype, types.keep_in_fp32_modules, precision.model_dtype)
    training.optimizer = _optimizer_of_user(training)
    training.lr_scheduler = choose_scheduler(settings.scheduler, lr_scheduler, basic_optimizer)
    sparse_names = _embedding_weights(module) if settings.sparse_gradients else set()
    state = TrainingState(
        module=module, training=training, config=settings.raw, sparse_tensor_module_names=sparse_names
    )
    engine_type: Callable[..., DeepSpeedEngine] = DeepSpeedEngine
    if isinstance(module, PipelineModule):
        engine_type = partial(PipelineEngine, pipeline=settings.pipeline)
        interval = settings.pipeline.activation_checkpoint_interval
        module.activation_checkpoint_interval = interval or module.activation_checkpoint_interval
    if settings.hybrid_engine.enabled:
        engine_type = partial(DeepSpeedHybridEngine, hybrid=settings.hybrid_engine)
    engine = engine_type(
        module,
        device=device,
        mesh=mesh,
        training=training,
        schedule=schedule,
        observers=training.observers,
        saving=_create_saving(settings, state, mesh),
        micro_batch_size=int(settings.train_micro_batch_size_per_gpu),
        config=settings.raw,
        answers=read_answers(settings),
        arguments={
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "training_data": training_data,
            "collate_fn": collate_fn,
            "mpu": mpu,
            "local_rank": local_rank(args),
        },
        sparse_tensor_module_names=sparse_names,
    )
    log.announce(start_line(engine))
    if settings.dump_state:
        log.report(settings.describe())
    notify("ds_engine_ready", engine=engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`. The launcher's `--local_rank` is the script's own to add."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed (for the script to look at)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the DeepSpeed JSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def _config_source(args: Any, config: Any, config_params: Any) -> ConfigSource:
    """The one configuration among the three places that may name it."""
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = {
        name: value
        for name, value in (("config", config), ("config_params", config_params), ("args.deepspeed_config", from_args))
        if value is not None
    }
    if not given:
        raise ConfigError(
            "initialize: found no configuration; pass config=<path or dict>, or --deepspeed_config through args"
        )
    sources = list(given.values())
    if any(source is not sources[0] and source != sources[0] for source in sources[1:]):
        raise ConfigError(f"initialize: found different configurations in {' and '.join(given)}; give one")
    return sources[0]  # type: ignore[no-any-return]


def _start_communication(dist_init_required: bool | None, port: int) -> None:
    if dist_init_required is False and not comm.is_initialized():
        raise ConfigError(
            "initialize: dist_init_required is False, but torch.distributed is not initialized; call "
            "deepspeed.init_distributed() first or leave the argument out"
        )
    comm.init_distributed(distributed_port=port)


def _asked_sizes(config: DeepSpeedConfig) -> dict[str, tuple[int, str]]:
    """By axis of the mesh the size that the configuration asks for, and its key. 1 asks for nothing but in `mesh`."""
    tp_size = config.tensor_parallel.size
    given = [(f"mesh.{axis}", axis, getattr(config.mesh, axis)) for axis in ("pp", "dp", "sp", "tp")]
    given.append(("tensor_parallel.autotp_size", "tp", tp_size if tp_size > 1 else None))
    for name, axis in (("sequence_parallel_size", "sp"), ("data_parallel_size", "dp")):
        given.append((name, axis, getattr(config, name)))
    return merge_sizes(given)


def _count_samples_once(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Correct the batch size of Trainer and Accelerate, who also count the ranks that get the same samples."""
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.tensor_parallel.size == 1 or None in sizes:
        return
    train, micro, steps = sizes
    if train == micro * steps * mesh.size("dp") * mesh.size("tp"):
        config.train_batch_size = train // mesh.size("tp")


def _check_same(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """What decides which collectives a rank takes part in. A collective of all ranks of the model."""
    zero = config.zero_optimization
    copies = f"mics_shard_size {zero.mics_shard_size}, zero_hpz_partition_size {zero.zero_hpz_partition_size}"
    facts = {
        "gradient_accumulation_steps": str(config.gradient_accumulation_steps),
        "gradient_clipping": str(config.gradient_clipping),
        "mics_shard_size and zero_hpz_partition_size": copies,
    }
    check_same(facts, mesh.norm_group)


def _split_data(mesh: Mesh, zero: ZeroConfig) -> Mesh:
    """The mesh with the copies of the weights that MiCS or hpZ asks for."""
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


def _copies(zero: ZeroConfig) -> Copies:
    if zero.mics_shard_size > 0:
        return Copies.MODEL
    return Copies.WEIGHTS if zero.zero_hpz_partition_size > 1 else Copies.NONE


def _asked_dtypes(config: DeepSpeedConfig) -> dict[str, torch.dtype]:
    """The dtypes to train in besides fp32, by the key that asks for them."""
    asked = {
        "data_types.param_dtype": (config.data_types.param_dtype == "bf16", torch.bfloat16),
        "fp16.enabled": (config.fp16.enabled, torch.float16),
        "bf16.enabled": (config.bf16.enabled, torch.bfloat16),
        "torch_autocast.dtype": (config.torch_autocast.enabled, torch_dtype(config.torch_autocast.dtype)),
    }
    return {key: dtype for key, (is_enabled, dtype) in asked.items() if is_enabled}


def _create_precision(config: DeepSpeedConfig, device: torch.device) -> Precision:
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


def _create_sharding(
    config: DeepSpeedConfig,
    precision: Precision,
    optimizer: Optimizer | None,
    mesh: Mesh,
    units: UnitGroups,
    placement: Placement,
    shard_home: ShardHome | None,
    device: torch.device,
) -> Sharding:
    group, ranks = mesh.gradient_group(), units.dense.everyone
    zero = config.zero_optimization
    accumulation = config.data_types.grad_accum_dtype
    if accumulation not in (None, "fp32") and precision.model_dtype is None:
        raise ConfigError(
            f"data_types.grad_accum_dtype: found {accumulation!r} with fp32 parameters, whose gradients would be "
            'rounded; use "fp32", or enable bf16 or fp16'
        )
    wire = config.communication_data_type
    options = ShardingOptions(
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
    )
    for each in options.model_ranks:
        each.connect()
    if optimizer is None and zero.stage < 3:
        return Stage0(options, ranks, group)
    is_tested = optimizer is None or zero.stage == 0 or is_tested_with_zero(optimizer)
    is_refused = zero.stage == 3 and not is_elementwise(optimizer)  # by the stage, whatever is allowed
    if not is_tested and not is_refused and not config.zero_allow_untested_optimizer:
        raise ConfigError(
            f"optimizer: found {type(optimizer).__name__} with zero_optimization.stage {zero.stage}, which was not "
            'tested together; set "zero_allow_untested_optimizer": true to use it, or stage 0'
        )
    stages: dict[int, type[Sharding]] = {0: Stage0, 1: Stage1, 2: Stage2, 3: Stage3}
    stage: Callable[..., Sharding] = plugin_manager().hook.ds_sharding(name=str(zero.stage)) or stages[zero.stage]
    partitioning = (_stage3_options(zero, shard_home),) if zero.stage == 3 else ()
    return stage(options, ranks, group, *partitioning)


def _choose_shard_home(config: DeepSpeedConfig, device: torch.device) -> ShardHome | None:
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
        quantizes_gradients=zero.zero_quantized_gradients,
        keeps_frozen_in_int8=zero.zero_quantized_nontrainable_weights,
        checks_values=zero.enable_sanity_checks,
        home=home,
    )


def _refuse_quantized(zero: ZeroConfig) -> None:
    """Below stage 3 weights are not gathered for modules, and gradients are reduced as they are."""
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if getattr(zero, name) and zero.stage < 3:
            raise ConfigError(
                f"zero_optimization.{name}: found true with zero_optimization.stage {zero.stage}, which sends weights "
                f"and gradients in their own dtype; set stage to 3, or {name} to false"
            )


def _refuse_of_parts(module: torch.nn.Module, optimizer: Optimizer | None) -> None:
    """Optimizers that take norms or products of whole parameters would take those of this rank's parts."""
    if optimizer is None or is_elementwise(optimizer):
        return
    divided = next((name for name, part in parts_held(module).items() if not part.is_whole), None)
    if divided is not None:
        raise ConfigError(
            f"optimizer: found {type(optimizer).__name__} for a model of which tensor-parallel ranks have parts "
            f"({divided}); it needs whole parameters, so use an elementwise optimizer, such as AdamW, or "
            "tensor_parallel.autotp_size 1"
        )


def _move(model: torch.nn.Module, device: torch.device, stage: int) -> torch.nn.Module:
    """Bring the model to its device. Stage 3 moves parameters itself, as it shards them; here go the buffers."""
    if stage < 3:
        before = dict(model.named_parameters(remove_duplicate=False))
        model.to(device)
        for name, param in model.named_parameters(remove_duplicate=False):
            if param is not before[name]:  # torch made a new one, for some devices: keep the marks of experts and parts
                vars(param).update(vars(before[name]))
        return model
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def _predivide_factor(config: DeepSpeedConfig) -> float | None:
    """By what gradients are divided before the sum; None: by the number of ranks, and by nothing after it."""
    factor = config.gradient_predivide_factor
    return None if config.prescale_gradients or factor == 1.0 else factor


def _optimizer_of_user(training: Training) -> Optimizer | None:
    """In fp32 without sharding the torch optimizer itself, as documented; else a wrapper whose step is the engine's."""
    optimizer, precision = training.basic_optimizer, training.precision
    is_plain = precision.model_dtype is None and not precision.checks_overflow
    if optimizer is None:  # at stage 3 libraries find the hooks on the module here
        sharding: Any = training.sharding
        return sharding.gathering.hooks if sharding.stage == 3 else None
    if training.sharding.stage == 0 and is_plain:
        return optimizer
    return ZeroOptimizer(training.sharding, optimizer, training.optimizer_step, precision.loss_scaler)


def _create_observers(config: DeepSpeedConfig, group: Any, *, scales_loss: bool) -> Observers:
    """A collective over `group`, whose ranks print their tables together."""
    throughput, every = config.timers.throughput, config.steps_per_print
    if every is None:
        every = _STEPS_PER_TABLE if config.wall_clock_breakdown or config.memory_breakdown else float("inf")
    return Observers(
        MonitorMaster(config.monitor_config),
        Breakdown(times=config.wall_clock_breakdown, memory=config.memory_breakdown),
        # the observers say when a line is due, so that it is due with the others after a checkpoint was loaded too
        ThroughputTimer(throughput, int(config.train_batch_size), steps_per_output=1, logging_fn=log.announce),
        steps_per_print=every,
        shows_loss_scale=config.fp16.enabled or scales_loss,
        group=ranks_of_table(is_enabled=config.wall_clock_breakdown, steps_per_print=every, group=group),
    )


def _create_saving(config: DeepSpeedConfig, state: TrainingState, mesh: Mesh) -> Saving:
    gather = partial(_gather, group=mesh.norm_group)
    sharding, section, nebula = state.sharding, config.checkpoint, config.nebula
    checkpointer = Checkpointer(
        gather=gather,
        store=create_store(section.store.type, section.store.params),
        prefix="bf16_" if state.training.precision.model_dtype == torch.bfloat16 else "",
        dp_rank=sharding.rank,
        dp_world_size=sharding.world_size,
        mp_rank=mesh.model_rank,
        mp_world_size=mesh.model_size,
        division=_division(state.module, mesh),
        partitioned_model=sharding.stage >= 3,
        verify=section.verify,
        keep_last=nebula.keep_last if section.keep_last is None else section.keep_last,
        background=BackgroundWriter(section.wait_s) if section.async_save or nebula.enabled else None,
    )
    sharding.wait_for_copy = checkpointer.wait_for_copy
    meet = Arrivals(mesh.norm_group, section.wait_s).wait_for_all if comm.get_world_size(mesh.norm_group) > 1 else None
    return Saving(
        state,
        checkpointer,
        gather=gather,
        tag_validation=section.tag_validation,
        deepspeed_sub_group_size=_deepspeed_sub_group_size(config, sharding.stage),
        meet=meet,
        save_dir=nebula.save_dir,
        load_dir=nebula.load_dir,
    )


def _division(module: torch.nn.Module, mesh: Mesh) -> Division | None:
    """What checkpoints say of the division of the model; None where the caller divided it, without a mark."""
    axes, parts = {axis: mesh.size(axis) for axis in ("pp", "tp")}, parts_held(module)
    if axes["pp"] > 1 and not getattr(module, "names_are_global", False):
        return None
    if axes["tp"] > 1 and not division_is_known(module):
        return None
    experts = {}
    for group_name, ep_size in expert_sizes(module).items():
        names = [name for name, param in module.named_parameters() if expert_group_of(param) == group_name]
        if ep_size > 1:
            places = mesh.ranks("dp", "sp")
            holders = [places.index(rank) for rank in mesh.experts(ep_size).ranks("edp")]
            experts[group_name] = Experts(tuple(holders), tuple(names))
    if any(name not in parts for each in experts.values() for name in each.names):
        return None
    return Division(axes, parts, experts)


def _deepspeed_sub_group_size(config: DeepSpeedConfig, stage: int) -> int | None:
    if config.checkpoint.format != "deepspeed":
        return None
    if stage == 3 and config.fp16.enabled:
        raise ConfigError(
            "checkpoint.format: found 'deepspeed' with fp16 and zero_optimization.stage 3, whose loss scale this "
            "version cannot write for DeepSpeed; use bf16 or stage 2, or omit the key"
        )
    if stage == 0:
        raise ConfigError(
            "checkpoint.format: found 'deepspeed' with zero_optimization.stage 0, whose files have the optimizer's "
            "state in another form; use stage 1, which loads in any stage here, or omit the key"
        )
    return int(config.zero_optimization.sub_group_size)


def _gather(value: Any, group: ProcessGroup) -> list[Any]:
    """The value of every rank of `group`, which share a checkpoint, in rank order."""
    return all_gather_values(value, group) if comm.get_world_size(group) > 1 else [value]


def _embedding_weights(module: torch.nn.Module) -> set[str]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {f"{name}.weight".lstrip(".") for name, part in module.named_modules() if isinstance(part, kinds)}
