"""`deepspeed.initialize`: configuration -> parts -> engine, in reading order.

Only this file and `sharding.py` read the root of the configuration.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Dataset

from deepspeed import comm, log
from deepspeed._installation import foreign_deepspeed, foreign_files_warning
from deepspeed.comm.give_up import together
from deepspeed.comm.values import check_same
from deepspeed.config import DeepSpeedConfig, redacted
from deepspeed.config.compression import asks_for_moq, rounds_after_steps
from deepspeed.config.precision import torch_dtype
from deepspeed.config.read import ConfigSource
from deepspeed.data.loader import check_data
from deepspeed.engine.accessors import read_answers
from deepspeed.engine.determinism import create_order
from deepspeed.engine.device import claim_device, claim_dtypes, local_rank, move_module
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.hybrid import DeepSpeedHybridEngine
from deepspeed.engine.observers import (
    Progress,
    create_device_faults,
    create_observers,
    create_profile,
    create_slow_ranks,
)
from deepspeed.engine.optimizers import (
    OptimizerLike,
    Parameters,
    SchedulerLike,
    choose_optimizer,
    choose_scheduler,
    optimizer_of_user,
    refuse_parts,
    trainable,
    warn_without_optimizer,
)
from deepspeed.engine.pipeline import PipelineEngine, mesh_of_pipeline, refuse_inner_pipeline
from deepspeed.engine.saving import create_saving
from deepspeed.engine.sharding import (
    asked_dtypes,
    copies_of_weights,
    create_precision,
    create_shard_home,
    create_sharding,
    refuse_keys,
    split_data,
)
from deepspeed.engine.start_line import start_line
from deepspeed.engine.step_schedules import StepSchedules, create_curriculum, create_step_schedules
from deepspeed.engine.training import Accumulation, Training
from deepspeed.engine.training_state import SavedPart, TrainingState
from deepspeed.errors import ConfigError
from deepspeed.inference.weight_quantization import prepare_stored
from deepspeed.log import warn_once
from deepspeed.moe.experts import divide_experts
from deepspeed.moe.layer import DivideExpert, connect_moe_layers
from deepspeed.optim import is_elementwise
from deepspeed.parallel import groups
from deepspeed.parallel.layout import merge_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import expert_sizes, is_tensor_parallel
from deepspeed.pipe.module import PipelineModule
from deepspeed.plugins.manager import plugin_manager
from deepspeed.precision.policy import cast_buffers, cast_floating
from deepspeed.tensor_parallel.ranks import ranks_asked_by
from deepspeed.uncaught import report_to_launcher
from deepspeed.zero.managed import (
    refuse_inference,
    refuse_managed,
    refuse_meta,
    refuse_sharded,
    refuse_unshaped,
    refuse_wrapped,
    warn_of_shared_memory,
)
from deepspeed.zero.module_units import mark_configured
from deepspeed.zero.offload.policy import asks_for_host, choose_placement
from deepspeed.zero.param_unit import unit_of
from deepspeed.zero.replicas import OuterSteps, create_check
from deepspeed.zero.sharding import Sharding
from deepspeed.zero.stages import LocalSteps
from deepspeed.zero.unit import synchronize_module, synchronize_tied
from deepspeed.zero.unit_groups import unit_groups

if TYPE_CHECKING:
    from deepspeed.compression.moq import MixtureOfQuantization
    from deepspeed.data.sampler import Curriculum


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
        model_parameters: parameters or groups that the optimizer updates; default: all that require gradients.
        training_data: a dataset, for which a distributed loader is made.
        lr_scheduler: a scheduler, or a callable that gets the optimizer; beats the config's.
        distributed_port: port of the rendezvous, if this call starts torch.distributed without a launcher.
        mpu: an object with `get_data_parallel_group()`, `..._world_size()` and `..._rank()`, and the same for
            tensor, pipeline or sequence parallelism, if the caller made the groups and divides the model itself.
        dist_init_required: False if torch.distributed was initialized by the caller.
        collate_fn: passed to the loader.
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
    return initialize_as(DeepSpeedEngine, **locals())


def initialize_as(
    engine_type: Callable[..., DeepSpeedEngine], **arguments: Any
) -> tuple[DeepSpeedEngine, Optimizer | None, Any, Any]:
    """Do what `initialize` does, with an engine of another class.

    Args:
        engine_type: called as `DeepSpeedEngine` is. A `PipelineModule` and the hybrid engine have their own.
        arguments: all of `initialize`, by name.
    """
    report_to_launcher()
    # some ranks of the world may have no part in it
    all_ranks = nullcontext() if arguments["mpu"] is not None else together("initialize")
    with torch.inference_mode(False), all_ranks:  # what an engine makes is trained later
        return _initialize(engine_type, **arguments)


def _initialize(
    engine_type: Callable[..., DeepSpeedEngine],
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
        check_data("initialize: training_data", training_data, collate_fn, may_be_empty=False)
    source = config_source(args, config, config_params)
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
    if optimizer is not None or settings.optimizer is not None or settings.zero_optimization.stage == 3:
        refuse_inference(model.named_parameters())
    refuse_wrapped(model, settings.zero_optimization.stage)
    refuse_inner_pipeline(model)
    warn_of_shared_memory(model, settings.zero_optimization.stage)
    if optimizer is not None and "gradient_clipping" not in settings.model_fields_set:
        settings.gradient_clipping = 0.0  # by default, the gradients of a script's own optimizer are not clipped
    _start_communication(dist_init_required, distributed_port)
    if isinstance(model, PipelineModule):
        has_optimizer = optimizer is not None or settings.optimizer is not None
        mesh = mesh_of_pipeline(model, mpu, mesh_param, _asked_sizes(settings), has_optimizer=has_optimizer)
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
    slow_ranks = create_slow_ranks(settings.watch, mesh)  # before the group backends, whose waits it counts

    zero = settings.zero_optimization
    shard_home = create_shard_home(settings, device)
    refuse_keys(settings, mesh)
    divide_expert: DivideExpert | None = None
    if mesh.size("tp") > 1:
        from deepspeed.tensor_parallel import entry  # late: few runs need it, and torch.distributed.tensor loads sympy

        divide_expert = entry.divide_expert
        if settings.tensor_parallel.size > 1:
            entry.divide_over(model, mesh, settings.tensor_parallel)
    module = move_module(model, device, zero.stage)
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
    refuse_parts(module, basic_optimizer)
    precision.refuse_complex(module)
    refuse_sharded(module, zero.stage)
    if settings.data_types.param_dtype == "fp32":
        cast_floating((param for param in module.parameters() if unit_of(param) is None), torch.float32)
    leaf = zero.leaf_module
    mark_configured(module, leaf.classes, leaf.names, leaf.name_suffixes)
    units = unit_groups(mesh, module, copies_of_weights(zero, settings.local_sgd))
    connect_moe_layers(module, mesh, divide_expert)
    progress = Progress()
    order = create_order(settings.deterministic, module, mesh, basic_optimizer, progress, placement, device)
    sharding = create_sharding(settings, precision, basic_optimizer, mesh, units, placement, shard_home, device)
    schedule = Accumulation(settings.gradient_accumulation_steps)
    experts = {name: mesh.gradient_group(size) for name, size in expert_sizes(module).items()}
    profile = create_profile(
        settings.autotuning,
        settings.flops_profiler,
        module,
        mesh,
        progress,
        micro_batch_size=int(settings.train_micro_batch_size_per_gpu),
        num_micro_batches=schedule.num_steps,
    )
    step_schedules = create_step_schedules(
        settings.curriculum_learning,
        settings.progressive_layer_drop,
        settings.data_efficiency,
        settings.compression_training,
        module=module,
        mesh=mesh,
        progress=progress,
        train_batch_size=int(settings.train_batch_size),
        rounds_weights=not rounds_after_steps(settings),
    )
    curriculum = create_curriculum(
        settings.data_efficiency,
        mesh,
        micro_batch_size=int(settings.train_micro_batch_size_per_gpu),
        num_steps=schedule.num_steps,
    )
    training = Training(
        sharding=sharding,
        precision=precision,
        schedule=schedule,
        observers=create_observers(
            settings.monitor_config,
            settings.timers.throughput,
            group,
            slow_ranks,
            profile,
            times=settings.wall_clock_breakdown,
            memory=settings.memory_breakdown,
            steps_per_print=settings.steps_per_print,
            train_batch_size=int(settings.train_batch_size),
            shows_loss_scale=settings.fp16.enabled or precision.loss_scaler.is_dynamic,
        ),
        basic_optimizer=basic_optimizer,
        train_batch_size=int(settings.train_batch_size),
        progress=progress,
        order=order,
    )
    if (faults := create_device_faults(settings.watch, device)) is not None:
        training.observers.after_step.append(faults.step_ended)
    if (check := create_check(zero, settings.watch, module, mesh, sharding)) is not None:
        training.before_update.append(check)
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
    training.moq = _create_moq(settings, module, mesh, sharding)
    if training.moq is not None:
        training.after_update.append(training.moq.after_update)
    outer = stage.outer if isinstance(stage := sharding.options.stage, LocalSteps) else None
    if outer is not None:
        outer.follow(sharding, precision.loss_scaler)
        training.before_update.append(outer.before_update)
        training.after_update.append(outer.after_update)
    if step_schedules is not None:
        step_schedules.follow(training)
    if curriculum is not None:
        training.after_update.append(curriculum.warn_if_idle)
    training.optimizer = optimizer_of_user(training)
    training.lr_scheduler = choose_scheduler(settings.scheduler, lr_scheduler, basic_optimizer)
    sparse_names = _embedding_weights(module) if settings.sparse_gradients else set()
    state = TrainingState(
        module=module,
        training=training,
        config=redacted(settings.raw),
        sparse_tensor_module_names=sparse_names,
        parts=_saved_parts(curriculum, step_schedules, training.moq, outer),
    )
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
    plugin_manager().notify("ds_engine_ready", engine=engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`. The script itself adds the launcher's `--local_rank`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed (for the script to look at)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the DeepSpeed JSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


def config_source(args: Any, config: Any, config_params: Any) -> ConfigSource:
    """Return the configuration that one of the three places gives; several must agree."""
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
    """Return, by mesh axis, the size that the configuration asks for and the key that asks for it.

    A size of 1 asks for nothing, except in `mesh`.

    Args:
        needed: the size that the model asks for, in the form that `merge_sizes` takes.
    """
    tp_size = config.tensor_parallel.size
    given = [(f"mesh.{axis}", axis, getattr(config.mesh, axis)) for axis in ("pp", "dp", "sp", "tp")]
    given.append(("tensor_parallel.autotp_size", "tp", tp_size if tp_size > 1 else None))
    for name, axis in (("sequence_parallel_size", "sp"), ("data_parallel_size", "dp")):
        given.append((name, axis, getattr(config, name)))
    return merge_sizes(given if needed is None else [*given, needed])


def _count_samples_once(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Correct the batch size of Trainer and Accelerate, which also count the ranks that get the same samples."""
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if config.tensor_parallel.size == 1 or None in sizes:
        return
    train, micro, steps = sizes
    if train == micro * steps * mesh.size("dp") * mesh.size("tp"):
        config.train_batch_size = train // mesh.size("tp")


def _check_same(config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Check that ranks agree on the settings that decide which collectives run, with what contents, and how much a
    rank's samples count. A collective of all ranks of the model."""
    zero = config.zero_optimization
    copies = f"mics_shard_size {zero.mics_shard_size}, zero_hpz_partition_size {zero.zero_hpz_partition_size}"
    facts = {
        "train_micro_batch_size_per_gpu": str(config.train_micro_batch_size_per_gpu),
        "gradient_accumulation_steps": str(config.gradient_accumulation_steps),
        "gradient_clipping": str(config.gradient_clipping),
        "mics_shard_size and zero_hpz_partition_size": copies,
    }
    facts["zero_optimization.enable_sanity_checks"] = str(zero.enable_sanity_checks)
    facts |= {
        name: str(getattr(config, name))
        for name in ("fp16", "bf16", "scheduler", "pipeline", "watch", "deterministic", "local_sgd")
    }
    check_same(facts, mesh.norm_group)


def _create_moq(
    config: DeepSpeedConfig, module: torch.nn.Module, mesh: Mesh, sharding: Sharding
) -> "MixtureOfQuantization | None":
    if not asks_for_moq(config):
        return None
    from deepspeed.compression.moq import create_moq  # late: few runs ask for it

    return create_moq(
        config,
        module,
        mesh,
        stage=sharding.stage,
        is_pipeline=isinstance(module, PipelineModule),
        trained={id(param) for param in sharding.units.params},
        masters={id(param) for unit in sharding.units if unit.has_masters for param in unit.params},
        accept=sharding.accept_rounded,
    )


def _saved_parts(
    curriculum: "Curriculum | None",
    step_schedules: StepSchedules | None,
    moq: "MixtureOfQuantization | None",
    outer: OuterSteps | None,
) -> dict[str, SavedPart]:
    random_ltd = None if step_schedules is None else step_schedules.random_ltd
    parts: dict[str, SavedPart | None] = {
        "data_sampler": curriculum,
        "random_ltd": random_ltd,
        "moq": moq,
        "local_sgd": outer,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _embedding_weights(module: torch.nn.Module) -> set[str]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {f"{name}.weight".lstrip(".") for name, part in module.named_modules() if isinstance(part, kinds)}
