"""`deepspeed.initialize`: configuration -> parts -> engine, in reading order.

It and `sharding.py` alone read the root of the configuration.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Dataset

from deepspeed import comm, log
from deepspeed._installation import foreign_deepspeed, foreign_files_warning
from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.together import together
from deepspeed.comm.values import all_gather_values, check_same
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.compression import asks_for_moq, asks_for_steps, rounds_after_steps
from deepspeed.config.monitor import WatchConfig
from deepspeed.config.precision import torch_dtype
from deepspeed.config.read import ConfigSource
from deepspeed.data.loader import check_data
from deepspeed.engine.accessors import read_answers
from deepspeed.engine.device import claim_device, claim_dtypes, local_rank
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.hybrid import DeepSpeedHybridEngine
from deepspeed.engine.observers import Observers, Progress, notify, ranks_of_table
from deepspeed.engine.optimizers import (
    OptimizerLike,
    Parameters,
    SchedulerLike,
    choose_optimizer,
    choose_scheduler,
    trainable,
    warn_without_optimizer,
)
from deepspeed.engine.pipeline import PipelineEngine, mesh_of_pipeline
from deepspeed.engine.saving import create_saving
from deepspeed.engine.sharding import (
    asked_dtypes,
    copies_of_weights,
    create_precision,
    create_shard_home,
    create_sharding,
    refuse_quantized,
    split_data,
)
from deepspeed.engine.slow_ranks import SlowRanks
from deepspeed.engine.start_line import start_line
from deepspeed.engine.training import Accumulation, Training
from deepspeed.engine.training_state import SavedPart, TrainingState
from deepspeed.errors import ConfigError
from deepspeed.inference.weight_quantization import prepare_stored
from deepspeed.log import warn_once
from deepspeed.moe.divide import divide_experts
from deepspeed.moe.layer import DivideExpert, connect_moe_layers
from deepspeed.monitor.monitor import MonitorMaster, is_writer
from deepspeed.optim import is_elementwise
from deepspeed.parallel import groups
from deepspeed.parallel.expert_params import expert_sizes
from deepspeed.parallel.layout import merge_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import is_tensor_parallel, parts_held
from deepspeed.pipe.module import PipelineModule
from deepspeed.plugins.manager import plugin_manager
from deepspeed.precision.policy import Precision, cast_buffers, cast_floating
from deepspeed.profiling.breakdown import Breakdown
from deepspeed.profiling.timer import ThroughputTimer
from deepspeed.tensor_parallel.ranks import ranks_asked_by
from deepspeed.uncaught import report_to_launcher
from deepspeed.zero.managed import (
    refuse_managed,
    refuse_meta,
    refuse_sharded,
    refuse_unshaped,
    warn_of_shared_memory,
)
from deepspeed.zero.module_units import mark_configured
from deepspeed.zero.offload.policy import asks_for_host, choose_placement
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.param_unit import unit_of
from deepspeed.zero.replicas import ReplicaCheck
from deepspeed.zero.sharding import Sharding
from deepspeed.zero.synchronize import synchronize_module, synchronize_tied
from deepspeed.zero.unit_groups import unit_groups

if TYPE_CHECKING:
    from deepspeed.autotuning.trial import TrialProfile
    from deepspeed.compression.moq import MixtureOfQuantization
    from deepspeed.compression.scheduler import BlockPruning
    from deepspeed.data.random_ltd import RandomLTDScheduler
    from deepspeed.data.sampler import Curriculum
    from deepspeed.engine.step_schedules import StepSchedules
    from deepspeed.profiling.step_profile import StepProfile

_STEPS_PER_TABLE = 10  # of `wall_clock_breakdown` and `memory_breakdown`, where `steps_per_print` does not say it
_MEASURES_NOTHING = (
    "autotuning.enabled: found true without metric_path, so nothing is measured and training goes on; search by "
    "`deepspeed --autotuning tune`"
)


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
    if mpu is not None:  # some ranks of the world may have no part in it
        return _initialize(**locals())
    with together("initialize"):
        return _initialize(**locals())


def _initialize(
    args: argparse.Namespace | None,
    model: torch.nn.Module | None,
    optimizer: OptimizerLike | None,
    model_parameters: Parameters | None,
    training_data: Dataset[Any] | None,
    lr_scheduler: SchedulerLike | None,
    distributed_port: int,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: Any,
    mesh_param: tuple[int, ...] | None,
    config_params: Any,
) -> tuple[DeepSpeedEngine, Optimizer | None, Any, Any]:
    if (version := foreign_deepspeed()) is not None:
        warn_once(foreign_files_warning(version))
    if not isinstance(model, torch.nn.Module):
        by_name = (
            ", by name: the first argument is args, so write model=model" if isinstance(args, torch.nn.Module) else ""
        )
        raise ConfigError(f"initialize: model is {type(model).__name__}; pass a torch.nn.Module{by_name}")
    refuse_unshaped(chain(model.named_parameters(), model.named_buffers()), "initialize")
    refuse_meta(chain(model.named_parameters(), model.named_buffers()), "initialize")
    if training_data is not None:
        check_data("initialize: training_data", training_data, collate_fn)
    source = _config_source(args, config, config_params)
    settings = DeepSpeedConfig(source, batch_required=False)
    if settings.log_level is not None:
        log.logger.setLevel(settings.log_level)
    settings.check_supported()
    if training_data is not None and settings.data_efficiency.asks_for_dynamic_batching():
        warn_once(
            "data_efficiency.data_sampling.dynamic_batching.enabled: found true with training_data, whose loader has "
            "batches of samples; for batches of tokens call "
            "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed with the engine, and use its loader"
        )
    _refuse_wrapped(model, settings.zero_optimization.stage)
    warn_of_shared_memory(model, settings.zero_optimization.stage)
    if optimizer is not None:
        _leave_unclipped(settings)
    _start_communication(dist_init_required, distributed_port)
    if isinstance(model, PipelineModule):
        mesh = mesh_of_pipeline(model, mpu, mesh_param, _asked_sizes(settings))
    else:
        needed = ranks_asked_by(model) if mpu is None else None
        is_divided = any(map(is_tensor_parallel, model.parameters()))
        mesh = groups.create_mesh(mpu, mesh_param, _asked_sizes(settings, needed), is_divided=is_divided)
    _count_samples_once(settings, mesh)
    settings.resolve_batch(mesh.size("dp"))
    _check_same(settings, mesh)
    mesh = split_data(mesh, settings.zero_optimization)
    mesh.data_before_expert = settings.use_data_before_expert_parallelism
    group = mesh.gradient_group()
    groups.view(mesh)
    plugin_manager().hook.ds_check_config(config=settings)
    if settings.expert_parallel.enabled:
        divide_experts(model, mesh, settings.expert_parallel)
    device = claim_device(args)
    claim_dtypes(asked_dtypes(settings))
    if "comms_logger" in settings.model_fields_set:
        comm.configure(settings)
    slow_ranks = _create_slow_ranks(settings.watch, mesh)  # before the backends of groups, whose waits it counts

    zero = settings.zero_optimization
    shard_home = create_shard_home(settings, device)
    refuse_quantized(zero)
    divide_expert: DivideExpert | None = None
    if mesh.size("tp") > 1:
        from deepspeed.tensor_parallel import entry  # late: few runs need it, and torch.distributed.tensor loads sympy

        divide_expert = entry.divide_expert
        if settings.tensor_parallel.size > 1:
            entry.divide_over(model, mesh, settings.tensor_parallel)
    module = _move(model, device, zero.stage)
    if mesh.size("tp") > 1:
        entry.prepare_params(module)
    precision = create_precision(settings, device)
    placement = choose_placement(
        zero.offload_optimizer,
        stage=zero.stage,
        device=device,
        home=shard_home,
        aio=settings.aio,
        rank=comm.get_rank(),
    )
    params = trainable(module, model_parameters)
    if optimizer is None and settings.optimizer is None:
        arguments = {"model_parameters": model_parameters, "training_data": training_data}
        warn_without_optimizer(params, given=" and ".join(name for name in arguments if arguments[name] is not None))
    basic_optimizer = choose_optimizer(
        settings.optimizer,
        optimizer,
        params,
        module,
        on_host=asks_for_host(zero.offload_optimizer, zero.stage),
        forces_host=settings.zero_force_ds_cpu_optimizer,
        unresolved=settings.unresolved_auto(),
    )
    weights_dtype = torch_dtype(settings.weights_dtype) if settings.weights_dtype is not None else None
    prepare_stored(module, settings, trains=basic_optimizer is not None, dtype=weights_dtype)
    refuse_managed(module, basic_optimizer, weights_dtype)
    _refuse_of_parts(module, basic_optimizer)
    _refuse_complex(module, precision)
    refuse_sharded(module, zero.stage)
    if settings.data_types.param_dtype == "fp32":
        cast_floating((param for param in module.parameters() if unit_of(param) is None), torch.float32)
    leaf = zero.leaf_module
    mark_configured(module, leaf.classes, leaf.names, leaf.name_suffixes)
    units = unit_groups(mesh, module, copies_of_weights(zero))
    connect_moe_layers(module, mesh, divide_expert)
    sharding = create_sharding(settings, precision, basic_optimizer, mesh, units, placement, shard_home, device)
    schedule = Accumulation(settings.gradient_accumulation_steps)
    experts = {name: mesh.gradient_group(size) for name, size in expert_sizes(module).items()}
    progress = Progress()
    profile = _create_profile(settings, module, mesh, progress)
    step_schedules = _create_step_schedules(settings, module, mesh, progress)
    curriculum = _create_curriculum(settings, mesh)
    training = Training(
        sharding=sharding,
        precision=precision,
        schedule=schedule,
        observers=_create_observers(settings, group, slow_ranks, profile, scales_loss=precision.loss_scaler.is_dynamic),
        basic_optimizer=basic_optimizer,
        train_batch_size=int(settings.train_batch_size),
        progress=progress,
        check=_create_check(settings, module, mesh, sharding),
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
    training.blocks = _connect_blocks(step_schedules, module, mesh)
    training.moq = _create_moq(settings, module, mesh, sharding)
    training.optimizer = _optimizer_of_user(training)
    training.lr_scheduler = choose_scheduler(settings.scheduler, lr_scheduler, basic_optimizer)
    sparse_names = _embedding_weights(module) if settings.sparse_gradients else set()
    state = TrainingState(
        module=module,
        training=training,
        config=settings.raw,
        sparse_tensor_module_names=sparse_names,
        parts=_saved_parts(curriculum, step_schedules, training.moq),
    )
    engine_type: Callable[..., DeepSpeedEngine] = DeepSpeedEngine
    if isinstance(module, PipelineModule):
        engine_type = partial(PipelineEngine, pipeline=settings.pipeline)
        interval = settings.pipeline.activation_checkpoint_interval
        module.set_checkpoint_interval(interval or module.activation_checkpoint_interval)
    if settings.hybrid_engine.enabled:
        engine_type = partial(DeepSpeedHybridEngine, hybrid=settings.hybrid_engine)
    engine = engine_type(
        module,
        device=device,
        mesh=mesh,
        training=training,
        schedule=schedule,
        observers=training.observers,
        saving=create_saving(
            settings.checkpoint, settings.nebula, state, mesh, sub_group_numel=int(zero.sub_group_size)
        ),
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
        step_schedules=step_schedules,
        curriculum=curriculum,
    )
    log.announce(start_line(engine))
    if settings.dump_state:
        log.report(settings.describe())
    notify("ds_engine_ready", engine=engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _refuse_wrapped(model: torch.nn.Module, stage: int) -> None:
    """Two that average gradients take them from one another, so that weights are wrong. TorchScript's modules have
    parameters that no other object can be put in place of."""
    kinds: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel,)
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        kinds += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        where = f"{name!r} of the model" if name else "the model"
        scripted = module.parameters() if isinstance(module, torch.jit.ScriptModule) else ()
        if any(param.requires_grad or stage == 3 for param in scripted):
            raise ConfigError(
                f"initialize: {where} was made by torch.jit, whose parameters the engine cannot hold; pass the module "
                "that was scripted or traced, and call engine.compile() for speed"
            )
        if isinstance(module, kinds):
            kind = next(cls.__name__ for cls in type(module).__mro__ if cls in kinds)
            raise ConfigError(
                f"initialize: {where} is a {kind}, which averages gradients over the ranks, as the engine does; pass "
                "the module inside it, before it is wrapped"
            )


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


def _asked_sizes(
    config: DeepSpeedConfig, needed: tuple[str, str, int | None] | None = None
) -> dict[str, tuple[int, str]]:
    """Return the size that the configuration asks for, and the key that asks, by axis of the mesh.

    A size of 1 asks for nothing, except in `mesh`.

    Args:
        needed: what the model asks for, as `merge_sizes` takes it.
    """
    tp_size = config.tensor_parallel.size
    given = [(f"mesh.{axis}", axis, getattr(config.mesh, axis)) for axis in ("pp", "dp", "sp", "tp")]
    given.append(("tensor_parallel.autotp_size", "tp", tp_size if tp_size > 1 else None))
    for name, axis in (("sequence_parallel_size", "sp"), ("data_parallel_size", "dp")):
        given.append((name, axis, getattr(config, name)))
    return merge_sizes(given if needed is None else [*given, needed])


def _count_samples_once(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Correct the batch size of Trainer and Accelerate, who also count the ranks that get the same samples."""
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.tensor_parallel.size == 1 or None in sizes:
        return
    train, micro, steps = sizes
    if train == micro * steps * mesh.size("dp") * mesh.size("tp"):
        config.train_batch_size = train // mesh.size("tp")


def _leave_unclipped(config: DeepSpeedConfig) -> None:
    """A script that brings its optimizer gets its gradients as they are, unless the configuration says otherwise."""
    if "gradient_clipping" not in config.model_fields_set:
        config.gradient_clipping = 0.0


def _check_same(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Check that ranks agree on what decides their collectives: which ones, with what contents, and how much a rank's
    samples count. A collective of all ranks of the model."""
    zero = config.zero_optimization
    copies = f"mics_shard_size {zero.mics_shard_size}, zero_hpz_partition_size {zero.zero_hpz_partition_size}"
    facts = {
        "train_micro_batch_size_per_gpu": str(config.train_micro_batch_size_per_gpu),
        "gradient_accumulation_steps": str(config.gradient_accumulation_steps),
        "gradient_clipping": str(config.gradient_clipping),
        "mics_shard_size and zero_hpz_partition_size": copies,
    }
    facts["zero_optimization.enable_sanity_checks"] = str(zero.enable_sanity_checks)
    facts |= {name: str(getattr(config, name)) for name in ("fp16", "bf16", "scheduler", "pipeline", "watch")}
    check_same(facts, mesh.norm_group)


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


def _refuse_complex(module: torch.nn.Module, precision: Precision) -> None:
    """A complex parameter has no low precision, and its master weight is itself; an update has masters of one kind."""
    if precision.model_dtype is None:
        return
    for name, param in module.named_parameters():
        if param.is_complex() and param.requires_grad:
            dtype = str(param.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{precision.name}: the parameter {name!r} is {dtype}, which has no form in 16 bits; train it in "
                "fp32, or keep the parameter as real numbers (torch.view_as_real) and make it complex in the forward "
                "(torch.view_as_complex)"
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


def _optimizer_of_user(training: Training) -> Optimizer | None:
    """Return the torch optimizer itself in fp32 without sharding, as documented; else a wrapper with our step."""
    optimizer, precision = training.basic_optimizer, training.precision
    is_plain = precision.model_dtype is None and not precision.checks_overflow
    if optimizer is None:  # at stage 3 libraries find the hooks on the module here
        sharding: Any = training.sharding
        return sharding.gathering.hooks if sharding.stage == 3 else None
    if training.sharding.options.stage.shows_gradients and is_plain:
        training.reduce_before_steps_of(optimizer)
        return optimizer
    return ZeroOptimizer(training.sharding, optimizer, training.optimizer_step, precision.loss_scaler)


def _create_check(
    config: DeepSpeedConfig, module: torch.nn.Module, mesh: Mesh, sharding: Sharding
) -> ReplicaCheck | None:
    """Create the check that compares copies of weights before updates, a collective; None where none is asked for."""
    if config.zero_optimization.enable_sanity_checks:
        return ReplicaCheck(module, mesh, sharding, key="zero_optimization.enable_sanity_checks", every=1)
    if every := config.watch.compare_weights_every:
        return ReplicaCheck(module, mesh, sharding, key="watch.compare_weights_every", every=every)
    return None


def _create_slow_ranks(config: WatchConfig, mesh: Mesh) -> SlowRanks | None:
    if config.slow_rank_window == 0 or len(mesh.layout.ranks) == 1:
        return None
    return SlowRanks(mesh, window=config.slow_rank_window, factor=config.slow_rank_factor)


def _create_step_schedules(
    config: DeepSpeedConfig, module: torch.nn.Module, mesh: Mesh, progress: Progress
) -> "StepSchedules | None":
    curriculum, layer_drop = config.curriculum_learning, config.progressive_layer_drop
    drops_tokens = config.data_efficiency.asks_for_random_ltd()
    compresses = asks_for_steps(config.compression_training)
    if not (curriculum.enabled or layer_drop.enabled or drops_tokens or compresses):
        return None
    if layer_drop.enabled and isinstance(module, PipelineModule):
        raise ConfigError(
            "progressive_layer_drop.enabled: found true with a PipelineModule, whose layers take no arguments of a "
            "step; switch it off, or drop layers in the layers' own forward"
        )
    if drops_tokens and isinstance(module, PipelineModule):
        raise ConfigError(
            "data_efficiency.data_routing.random_ltd.enabled: found true with a PipelineModule, whose layers "
            "convert_to_random_ltd does not reach; switch it off, or drop tokens in the layers' own forward"
        )
    from deepspeed.engine.step_schedules import StepSchedules  # late: few runs ask for it

    random_ltd = _create_random_ltd(config, mesh) if drops_tokens else None
    compression = None
    if compresses:
        from deepspeed.compression.scheduler import compression_scheduler

        compression = compression_scheduler(
            module,
            config.compression_training,
            lambda: progress.global_steps,
            rounds_weights=not rounds_after_steps(config),
        )
    return StepSchedules(curriculum, layer_drop, lambda: progress.global_steps, random_ltd, compression)


def _connect_blocks(
    step_schedules: "StepSchedules | None", module: torch.nn.Module, mesh: Mesh
) -> "BlockPruning | None":
    compression = None if step_schedules is None else step_schedules.compression
    if compression is None or compression.blocks is None:
        return None
    if isinstance(module, PipelineModule):
        raise ConfigError(
            "compression_training.sparse_pruning.shared_parameters.method: found 'snip_momentum' with a "
            "PipelineModule, whose layers are not all on one rank to be compared; use 'topk' or 'l1'"
        )
    num_ranks = mesh.size("dp") * mesh.size("sp")
    if num_ranks > 1:
        backend = group_backend(mesh.gradient_group())

        def average(values: torch.Tensor) -> None:
            backend.all_reduce(values).wait()
            values /= num_ranks

        compression.blocks.average = average
    return compression.blocks


def _create_moq(
    config: DeepSpeedConfig, module: torch.nn.Module, mesh: Mesh, sharding: Sharding
) -> "MixtureOfQuantization | None":
    if not asks_for_moq(config):
        return None
    from deepspeed.compression.moq import create_moq  # late: few runs ask for it

    group = mesh.gradient_group()

    def average(values: list[float]) -> list[float]:
        by_rank = all_gather_values(values, group) if mesh.size("dp") * mesh.size("sp") > 1 else [values]
        return [sum(each) / len(each) for each in zip(*by_rank, strict=True)]

    return create_moq(
        config,
        module,
        stage=sharding.stage,
        is_pipeline=isinstance(module, PipelineModule),
        trained={id(param) for param in sharding.units.params},
        masters={id(param) for unit in sharding.units if unit.has_masters for param in unit.params},
        accept=sharding.accept_rounded,
        average=average,
    )


def _create_random_ltd(config: DeepSpeedConfig, mesh: Mesh) -> "RandomLTDScheduler":
    for axis, ranks in (("tp", "tensor-parallel"), ("sp", "sequence-parallel")):
        if mesh.size(axis) > 1:
            raise ConfigError(
                f"data_efficiency.data_routing.random_ltd.enabled: found true with {mesh.size(axis)} {ranks} ranks, "
                "each of which would drop other tokens of one sample; switch it off, or use data-parallel ranks alone"
            )
    from deepspeed.data.random_ltd import RandomLTDScheduler  # late: few runs ask for it

    return RandomLTDScheduler(config.data_efficiency.data_routing.random_ltd, int(config.train_batch_size))


def _saved_parts(
    curriculum: "Curriculum | None", step_schedules: "StepSchedules | None", moq: "MixtureOfQuantization | None"
) -> dict[str, SavedPart]:
    random_ltd = None if step_schedules is None else step_schedules.random_ltd
    parts: dict[str, SavedPart | None] = {"data_sampler": curriculum, "random_ltd": random_ltd, "moq": moq}
    return {name: part for name, part in parts.items() if part is not None}


def _create_curriculum(config: DeepSpeedConfig, mesh: Mesh) -> "Curriculum | None":
    section = config.data_efficiency
    if not section.asks_for_curriculum():
        return None
    from deepspeed.data.sampler import Curriculum  # late: few runs ask for it

    stages = mesh.group("pp") if mesh.size("pp") > 1 else None
    return Curriculum(
        section,
        micro_batch_size=int(config.train_micro_batch_size_per_gpu),
        num_steps=int(config.gradient_accumulation_steps),
        rank=mesh.rank("dp"),
        num_replicas=mesh.size("dp"),
        gather=None if stages is None else partial(all_gather_values, group=stages),
    )


def _create_profile(
    config: DeepSpeedConfig, module: torch.nn.Module, mesh: Mesh, progress: Progress
) -> "StepProfile | TrialProfile | None":
    """Create what measures a trial (`autotuning`), on every rank, or what profiles one step (`flops_profiler`), on
    rank 0 alone; None where neither is asked for."""
    if config.autotuning.measures:
        from deepspeed.autotuning.trial import TrialProfile  # late: few runs ask for it

        known = {"micro_batch": config.train_micro_batch_size_per_gpu}
        return TrialProfile(config.autotuning, module, known, is_whole=mesh.model_size == 1)
    if config.autotuning.enabled:
        warn_once(_MEASURES_NOTHING)
    if not (config.flops_profiler.enabled and is_writer()):
        return None
    from deepspeed.profiling.flops import FlopsProfiler  # late: few runs ask for it
    from deepspeed.profiling.step_profile import StepProfile

    facts = {
        "ranks": str(len(mesh.layout.ranks)),
        "data-parallel ranks": str(mesh.size("dp")),
        "ranks of one model": f"{mesh.model_size} ({mesh.size('pp')} stages x {mesh.size('tp')} tensor-parallel)",
        "micro-batch of a rank": str(config.train_micro_batch_size_per_gpu),
        "micro-batches": str(config.gradient_accumulation_steps),
    }
    return StepProfile(FlopsProfiler(module), config.flops_profiler, lambda: progress.global_steps, facts)


def _create_observers(
    config: DeepSpeedConfig,
    group: Any,
    slow_ranks: SlowRanks | None,
    profile: "StepProfile | TrialProfile | None",
    *,
    scales_loss: bool,
) -> Observers:
    """A collective over `group`, whose ranks print their tables together."""
    throughput, every = config.timers.throughput, config.steps_per_print
    if every is None:
        every = _STEPS_PER_TABLE if config.wall_clock_breakdown or config.memory_breakdown else float("inf")
    return Observers(
        MonitorMaster(config.monitor_config),
        Breakdown(times=config.wall_clock_breakdown, memory=config.memory_breakdown),
        # the observers say when a line is due, so that it is due with the others after a checkpoint was loaded too
        ThroughputTimer(
            throughput,
            int(config.train_batch_size),
            steps_per_output=1,
            logging_fn=partial(log.announce, is_asked_for=True),
        ),
        steps_per_print=every,
        shows_loss_scale=config.fp16.enabled or scales_loss,
        group=ranks_of_table(is_enabled=config.wall_clock_breakdown, steps_per_print=every, group=group),
        slow_ranks=slow_ranks,
        profile=profile,
    )


def _embedding_weights(module: torch.nn.Module) -> set[str]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {f"{name}.weight".lstrip(".") for name, part in module.named_modules() if isinstance(part, kinds)}
