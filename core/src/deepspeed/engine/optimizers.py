"""Choose an engine's optimizer and learning rate schedule: the user's, the configuration's, or none.

Called by `build.py`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed import log
from deepspeed.config.read import brief
from deepspeed.config.training import OptimizerConfig, SchedulerConfig
from deepspeed.engine.training import Training
from deepspeed.errors import ConfigError
from deepspeed.optim import arguments_of_step, create_optimizer, create_scheduler, is_elementwise, is_host_front
from deepspeed.optim.factory import is_per_head, scheduler_class
from deepspeed.parallel.model_part import parts_held
from deepspeed.zero.optimizer import ZeroOptimizer

Parameters = Iterable[Parameter] | Iterable[dict[str, Any]]
DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]
OptimizerLike = Optimizer | DeepSpeedOptimizerCallable
SchedulerLike = Any | DeepSpeedSchedulerCallable


def trainable(module: torch.nn.Module, model_parameters: Parameters | None) -> list[Any]:
    """Return the parameters or groups that the optimizer gets: the given ones, else all that require gradients.

    Raises:
        ConfigError: one of them is something else, such as a name.
    """
    if model_parameters is None:
        return [param for param in module.parameters() if param.requires_grad]
    if isinstance(model_parameters, torch.nn.Module | torch.Tensor | str) or not isinstance(model_parameters, Iterable):
        raise ConfigError(
            f"initialize: model_parameters is {type(model_parameters).__name__}; pass model.parameters(), a list of "
            "parameters, or groups of them, as torch's optimizers take"
        )
    given = list(model_parameters)
    for each in given:
        if not isinstance(each, torch.Tensor | dict | tuple):  # tuples: (name, parameter), which torch takes
            raise ConfigError(
                f"initialize: model_parameters holds {brief(each)} ({type(each).__name__}); pass parameters, such as "
                "model.parameters(), or groups of them, as torch's optimizers take"
            )
    return [
        {**group, "params": list(group["params"])}  # a generator, which can be read once
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator)
        else group
        for group in given
    ]


def choose_optimizer(
    section: OptimizerConfig | None,
    given: OptimizerLike | None,
    params: list[Any],
    module: torch.nn.Module,
    *,
    on_host: bool,
    forces_host: bool,
    unresolved: list[str],
) -> Optimizer | None:
    """Return the user's optimizer, or the config's, or None for an engine that only evaluates.

    Args:
        section: the config's section.
        params: parameters that the optimizer updates, see `trainable`.
        on_host: whether the optimizer updates in host memory (`offload_optimizer`).
        forces_host: whether the optimizer must then be fast on the host (`zero_force_ds_cpu_optimizer`).
        unresolved: dotted keys of the config that still say "auto".

    Raises:
        ConfigError: the argument is no optimizer, or the optimizer has nothing to train.
    """
    make = given if callable(given) and not isinstance(given, Optimizer) else None
    is_made = make is not None or (given is None and section is not None)
    trains = [param.requires_grad for param in module.parameters()]
    if is_made and not params and trains and not any(trains):
        log.log_dist("optimizer: the model has no parameter that trains; the engine only evaluates")
        return None  # a frozen reference model, with the configuration of the trained one
    if given is not None:
        if make is not None:
            _refuse_nothing_to_train("initialize() was given a callable that makes one", params, module)
        optimizer = given if make is None else make(params)
        if not isinstance(optimizer, Optimizer):
            found = "gave" if callable(given) else "is"
            raise ConfigError(
                f"initialize: optimizer {found} {type(optimizer).__name__}; wanted a torch.optim.Optimizer, or a "
                "callable that makes one of the parameters"
            )
        _refuse_step_with_arguments(optimizer)
        if on_host and forces_host and not is_host_front(optimizer):
            raise ConfigError(
                f"zero_force_ds_cpu_optimizer: found true, with offload_optimizer and an optimizer of the class "
                f"{type(optimizer).__name__}, which is slow on the host; use deepspeed.ops.adam.DeepSpeedCPUAdam (or "
                'Adagrad, Lion), name the optimizer in the config, or set "zero_force_ds_cpu_optimizer": false'
            )
        if section is not None:
            log.announce(
                f"optimizer: {type(optimizer).__name__}, which initialize() was given, is used in place of the "
                f"config's {section.type}"
            )
        return optimizer
    if section is None:
        return None
    _refuse_nothing_to_train(f"the config names {section.type}", params, module)
    if "optimizer.type" in unresolved:
        raise ConfigError('optimizer.type: found "auto", which Hugging Face\'s Trainer fills in; give a value')
    if section.type.lower() == "muon":
        from deepspeed.ops.muon import mark_muon_parameters  # late: others do not need it

        mark_muon_parameters(module, per_head=is_per_head(section.params))
    optimizer = create_optimizer(section.type, section.params, params, offload=on_host)
    _refuse_step_with_arguments(optimizer)  # a plugin may have made it
    return optimizer


def _refuse_step_with_arguments(optimizer: Optimizer) -> None:
    if needed := arguments_of_step(optimizer):
        raise ConfigError(
            f"optimizer: found {type(optimizer).__name__}, whose step() needs {', '.join(needed)}, and engine.step() "
            "gives none, since loss and gradients are there before it; use one whose step() needs no argument, such "
            "as AdamW, or train with this one in plain torch"
        )


def _refuse_nothing_to_train(asked: str, params: list[Any], module: torch.nn.Module) -> None:
    """Refuse an optimizer of no parameters: else the first step, or torch, would blame the config."""
    given = _members(params)
    if any(getattr(param, "requires_grad", True) for param in given):
        return
    num_trainable = sum(param.requires_grad for param in module.parameters())
    raise ConfigError(
        f"optimizer: {asked}, and "
        + ("model_parameters holds only frozen parameters" if given else "there are no parameters for it")
        + f" (the model has {num_trainable} that train)"
        + (
            "; leave model_parameters out to train them all; a generator can be read only once"
            if num_trainable
            else "; leave the optimizer out for an engine that only evaluates"
        )
    )


def _members(params: list[Any]) -> list[Any]:
    """Return the parameters that `trainable` returned as one list, without groups."""
    given: list[Any] = []
    for group in params:
        members = group.get("params", []) if isinstance(group, dict) else group
        is_many = isinstance(members, Iterable) and not isinstance(members, torch.Tensor)
        given += members if is_many else [members]
    return given


def warn_without_optimizer(params: list[Any], *, given: str) -> None:
    """Warn if neither the caller nor the config names an optimizer: else a training script would notice it only at its
    first step.

    Args:
        params: returned by `trainable`.
        given: arguments of `initialize` that only a training script passes; empty: none.
    """
    if given and any(getattr(param, "requires_grad", True) for param in _members(params)):
        log.warn_once(
            f"initialize: found {given} and no optimizer; the engine only evaluates, and step() raises. To train, name "
            'one in the config ("optimizer") or give one to initialize()'
        )


def choose_scheduler(section: SchedulerConfig | None, given: SchedulerLike | None, optimizer: Optimizer | None) -> Any:
    """Return the user's learning rate schedule, or the config's, or None. A callable gets the optimizer."""
    named = section is not None and section.type is not None
    if optimizer is None and (named if given is None else not hasattr(given, "step")):
        log.warn_once(
            "scheduler: found a learning rate schedule and no optimizer for it; it is not made. Name an optimizer in "
            'the config ("optimizer") or give one to initialize()'
        )
    if given is not None and optimizer is None and not hasattr(given, "step"):
        return None  # a callable needs an optimizer
    if given is not None:
        is_scheduler = hasattr(given, "step") and not isinstance(given, type)
        scheduler = given
        if not is_scheduler and callable(given) and optimizer is not None:
            _check_takes_optimizer(given)
            scheduler = given(optimizer)
        if section is not None and section.type is not None:
            log.announce(
                f"scheduler: {type(scheduler).__name__}, which initialize() was given, is used in place of the "
                f"config's {section.type}"
            )
        _warn_of_another(scheduler, optimizer)
        return _checked(scheduler, given)
    if section is None or section.type is None:
        return None
    if optimizer is None:
        scheduler_class(section.type)  # an unknown name is refused all the same
        return None
    return create_scheduler(section.type, section.params, optimizer)


def _check_takes_optimizer(make: Callable[..., Any]) -> None:
    try:
        inspect.signature(make).bind(None)
    except TypeError as error:
        name = getattr(make, "__name__", type(make).__name__)
        raise ConfigError(
            f"initialize: lr_scheduler is {name}, which is to be called with the optimizer alone: {error}; give "
            f"lr_scheduler=lambda optimizer: {name}(optimizer, ...) with its other arguments, or a schedule that "
            "exists"
        ) from None
    except ValueError:  # a callable in C may have no signature
        return


def _warn_of_another(scheduler: Any, optimizer: Optimizer | None) -> None:
    own = getattr(scheduler, "optimizer", None)
    if optimizer is None or not isinstance(own, Optimizer):
        return
    groups = {id(group) for group in optimizer.param_groups}  # Accelerate moves groups into another optimizer
    if own is optimizer or not groups.isdisjoint(map(id, own.param_groups)):
        return
    log.warn_once(
        f"scheduler: {type(scheduler).__name__}, which initialize() was given, was made for an optimizer "
        f"({type(own).__name__}) that this engine does not use: it changes no learning rate of the engine's "
        f"{type(optimizer).__name__}. Give initialize() that optimizer too (optimizer=), or a callable that makes the "
        "schedule (lr_scheduler=lambda optimizer: ...)"
    )


def _checked(scheduler: Any, given: Any) -> Any:
    if callable(getattr(scheduler, "step", None)):
        return scheduler
    found = "is" if scheduler is given else "gave"
    raise ConfigError(
        f"initialize: lr_scheduler {found} {type(scheduler).__name__}; wanted a schedule with step(), as of "
        "torch.optim.lr_scheduler, or a callable that makes one of the optimizer. A schedule by name stands in the "
        'configuration ("scheduler")'
    )


def refuse_parts(module: torch.nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse an optimizer that takes norms or products of whole parameters if this rank has only parts of them.

    Raises:
        ConfigError: names such a parameter and what to do.
    """
    if optimizer is None or is_elementwise(optimizer):
        return
    divided = next((name for name, part in parts_held(module).items() if not part.is_whole), None)
    if divided is not None:
        raise ConfigError(
            f"optimizer: found {type(optimizer).__name__} for a model of which tensor-parallel ranks have parts "
            f"({divided}); it needs whole parameters, so use an elementwise optimizer, such as AdamW, or "
            "tensor_parallel.autotp_size 1"
        )


def optimizer_of_user(training: Training) -> Optimizer | None:
    """Return torch's own optimizer in fp32 without sharding, as documented; else a wrapper with the engine's step."""
    optimizer, precision = training.basic_optimizer, training.precision
    is_plain = precision.model_dtype is None and not precision.checks_overflow
    if optimizer is None:  # at stage 3 libraries find the hooks on the module here
        sharding: Any = training.sharding
        return sharding.gathering.hooks if sharding.stage == 3 else None
    if training.sharding.options.stage.shows_gradients and is_plain:
        training.reduce_before_steps_of(optimizer)
        return optimizer
    return ZeroOptimizer(training.sharding, optimizer, training.optimizer_step, precision.loss_scaler)
