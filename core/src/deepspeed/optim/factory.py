"""Creates optimizers and schedules by their names in the config, `optimizer.type` and `scheduler.type`.

`engine.build` calls this. For an optimizer, the plugins are asked first (hook `ds_optimizer`). Then the name is looked
up, ignoring case, in DeepSpeed's names, and in the classes of `torch.optim` and `torch.optim.lr_scheduler`.

The constructor arguments in `optimizer.params` and `scheduler.params` are checked before the call, so that an error
message names a wrong key or type.
"""

import builtins
import difflib
import importlib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.compatibility import differences
from deepspeed.config.base import AUTO
from deepspeed.config.training import OptimizerConfig
from deepspeed.errors import ConfigError, counted
from deepspeed.plugins.manager import plugin_manager

_OPTIMIZER_PATH = "optimizer.params"
_SCHEDULER_PATH = "scheduler.params"
_ADAM_KEYS = ("torch_adam", "adam_w_mode")  # these arguments choose the class
_MUON_KEYS = ("per_head_muon",)  # the engine acts on it, as it marks the parameters
# names of optimizer classes in scripts, in lower case without "DeepSpeed" and underscores -> correct values of `type`
_KERNELS = {
    "fusedadam": ("Adam", "AdamW"),
    "cpuadam": ("Adam", "AdamW"),
    "cpuadagrad": ("Adagrad",),
    "fusedlion": ("Lion",),
    "cpulion": ("Lion",),
    "fusedlamb": ("Lamb",),
}
_REFUSED = {
    "LBFGS": "its step needs a closure, which the engine does not give",
    "ReduceLROnPlateau": "its step needs a metric, which the engine does not have; step it yourself",
}


def create_optimizer(
    type: str,
    params: Mapping[str, Any],
    param_groups: Sequence[Any],
    *,
    offload: bool = False,
) -> torch.optim.Optimizer:
    """Create the optimizer that the config names, over `param_groups` (groups, or parameters).

    `params` is the section `optimizer.params`. With `offload` the state is in host memory, so the CPU classes are used.
    Raises ConfigError, which names the key, for an unknown name or key, and for a wrong type or value.
    """
    given = _from_plugin(str(type), without_auto(params, _OPTIMIZER_PATH), param_groups)
    if given is not None:
        return given
    cls, arguments, documented = _chosen_optimizer(type, params, offload)
    return construct(cls, list(param_groups), arguments, _OPTIMIZER_PATH, str(type), documented)


def _chosen_optimizer(
    type: str, params: Mapping[str, Any], offload: bool
) -> tuple[builtins.type[Any], dict[str, Any], Sequence[str]]:
    """Return the class of the optimizer, its arguments, and the names of the arguments that chose the class."""
    arguments = dict(params)
    _check_not_engine_keys(arguments)
    key = str(type).lower()
    if key in _NATIVE:
        cls = _NATIVE[key](arguments, offload)
    else:
        cls = _class_of_torch(type, torch.optim, torch.optim.Optimizer, "optimizer.type", _NATIVE_NAMES)
    return cls, arguments, {"adam": _ADAM_KEYS, "adamw": _ADAM_KEYS, "muon": _MUON_KEYS}.get(key, ())


def check_optimizer(type: str, params: Mapping[str, Any], *, offload: bool = False) -> None:
    """Check the arguments of `create_optimizer` without parameters; "auto" is allowed. `ds_config check` calls it.

    Raises:
        ConfigError: names the key; ranges of values are not checked.
    """
    given = {key: value for key, value in params.items() if value != AUTO}
    if _from_plugin(str(type), given, [torch.nn.Parameter(torch.zeros(1))]) is None:
        cls, arguments, documented = _chosen_optimizer(type, given, offload)
        checked_arguments(cls, arguments, _OPTIMIZER_PATH, str(type), documented)


def check_scheduler(type: str, params: Mapping[str, Any]) -> None:
    """Check the arguments of `create_scheduler`. `params` are only checked if none of them is "auto".

    Raises:
        ConfigError: names the key; ranges of values are not checked.
    """
    cls = scheduler_class(type)
    if AUTO not in params.values():
        checked_arguments(cls, params, _SCHEDULER_PATH, str(type))


def create_scheduler(type: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """Create the schedule that the config names, over `optimizer` (any object with `param_groups`).

    `params` is the section `scheduler.params`. Raises ConfigError, which names the key, like `create_optimizer`.
    """
    cls = scheduler_class(type)
    if issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # torch's schedules require torch's class
    return construct(cls, optimizer, params, _SCHEDULER_PATH, str(type))


def scheduler_class(name: str) -> type[Any]:
    """Return the schedule class `name`, ignoring case. Raises ConfigError for an unknown name."""
    from deepspeed.optim import lr_schedules  # late: a run without a schedule does not need it

    names = lr_schedules.VALID_LR_SCHEDULES
    own = {each.lower(): each for each in names}
    if str(name).lower() in own:
        return getattr(lr_schedules, own[str(name).lower()])  # type: ignore[no-any-return]
    base = torch.optim.lr_scheduler.LRScheduler
    return _class_of_torch(name, torch.optim.lr_scheduler, base, "scheduler.type", names)


def _adam(arguments: dict[str, Any], offload: bool, *, always_w: bool) -> type:
    """Choose the class as DeepSpeed: "Adam" is AdamW unless `adam_w_mode` is false; `torch_adam`: torch's class."""
    torch_adam = _take_flag(arguments, "torch_adam", False)
    adam_w_mode = _take_flag(arguments, "adam_w_mode", True) or always_w
    if torch_adam:
        return torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    if offload:
        arguments["adamw_mode"] = adam_w_mode
        return _front("adam", "DeepSpeedCPUAdam")
    arguments["adam_w_mode"] = adam_w_mode
    # FusedAdam has no AMSGrad; DeepSpeedCPUAdam has it, and accepts parameters on any device
    if arguments.get("amsgrad") is True:
        arguments["adamw_mode"] = arguments.pop("adam_w_mode")
        return _front("adam", "DeepSpeedCPUAdam")
    return _front("adam", "FusedAdam")


def _muon(arguments: dict[str, Any]) -> type:
    is_per_head(arguments)
    arguments.pop("per_head_muon", None)
    return _front("muon", "Muon")


def is_per_head(arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments of "Muon" ask to orthogonalize attention projections head by head.

    Raises:
        ConfigError: `per_head_muon` is not true or false.
    """
    return _take_flag(dict(arguments), "per_head_muon", False)


def _front(op: str, name: str) -> type:
    """Import and return an optimizer class of `deepspeed.ops`."""
    return getattr(importlib.import_module(f"deepspeed.ops.{op}"), name)  # type: ignore[no-any-return]


def _one_bit(arguments: dict[str, Any], module: str, old: str, name: str) -> type:
    """Return an optimizer class that averages with one bit per element. Arguments that choose DeepSpeed's library of
    collectives are removed: they have no effect here."""
    for key in differences()[f"runtime.fp16.onebit.{old}:{name}.__init__"][0]:
        arguments.pop(key, None)
    return getattr(importlib.import_module(f"deepspeed.optim.{module}"), name)  # type: ignore[no-any-return]


_Choose = Callable[[dict[str, Any], bool], type]
# documented name -> function of (arguments, `offload`) that returns the class, and removes arguments for this choice
_CHOICES: dict[str, _Choose] = {
    "Adam": lambda arguments, offload: _adam(arguments, offload, always_w=False),
    "AdamW": lambda arguments, offload: _adam(arguments, offload, always_w=True),
    "Adagrad": lambda arguments, offload: _front("adagrad", "DeepSpeedCPUAdagrad"),
    "Lion": lambda arguments, offload: _front("lion", "DeepSpeedCPULion" if offload else "FusedLion"),
    "Lamb": lambda arguments, offload: _front("lamb", "FusedLamb"),
    "Muon": lambda arguments, offload: _muon(arguments),
    "OneBitAdam": lambda arguments, offload: _one_bit(arguments, "one_bit", "adam", "OnebitAdam"),
    "OneBitLamb": lambda arguments, offload: _one_bit(arguments, "one_bit_lamb", "lamb", "OnebitLamb"),
    "ZeroOneAdam": lambda arguments, offload: _one_bit(arguments, "zero_one_adam", "zoadam", "ZeroOneAdam"),
}
_NATIVE = {name.lower(): choose for name, choose in _CHOICES.items()}
_NATIVE_NAMES = list(_CHOICES)


def _take_flag(arguments: dict[str, Any], key: str, default: bool) -> bool:
    value = arguments.pop(key, default)
    if value == AUTO:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{_OPTIMIZER_PATH}.{key}: found {value!r}, but it must be true or false")
    return value


def _check_not_engine_keys(arguments: Mapping[str, Any]) -> None:
    if "max_grad_norm" in arguments:
        raise ConfigError(
            f"{_OPTIMIZER_PATH}.max_grad_norm: found {arguments['max_grad_norm']!r}, but the engine clips, not the "
            "optimizer; remove it and set the top-level key gradient_clipping"
        )


def _from_plugin(name: str, arguments: Mapping[str, Any], params: Sequence[Any]) -> torch.optim.Optimizer | None:
    """Return the optimizer of the first plugin whose hook `ds_optimizer` knows the name, or None."""
    groups = list(params)
    if not all(isinstance(entry, dict) for entry in groups):
        groups = [{"params": groups}]
    return plugin_manager().hook.ds_optimizer(name=name, params=groups, arguments=arguments)


def _class_of_torch(name: str, module: Any, base: type, path: str, ours: Sequence[str]) -> type:
    """Return a class of a torch module by name. If unknown, raise a ConfigError with the nearest name and all names."""
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not key.startswith("_")
    }
    usable = {key.lower(): value for key, value in classes.items() if key not in _REFUSED and key != "LRScheduler"}
    key = str(name).lower()
    if key in usable:
        return usable[key]
    for known, why in _REFUSED.items():
        if key == known.lower():
            raise ConfigError(f"{path}: found {name!r}, which cannot be used by name: {why}")
    if path == "optimizer.type" and OptimizerConfig(type=str(name)).refusal():
        raise ConfigError(f"{path}: found {name!r}, which is not in this version; use Adam, AdamW or Lamb")
    if path == "optimizer.type" and (types := _KERNELS.get(key.replace("_", "").removeprefix("deepspeed"))):
        raise ConfigError(
            f"{path}: found {name!r}, a kernel that {types[0]} uses where it fits; write {' or '.join(types)}"
        )
    torch_names = sorted(value.__name__ for value in usable.values())
    others = [word for word in torch_names if word not in ours]
    raise ConfigError(
        f"{path}: found {name!r}, which is not known.{suggestion(str(name), [*ours, *others])} "
        f"Known are {', '.join(ours)}, and torch's {', '.join(others)}"
    )


#: parameters for which infinity means "no bound", and divisors in torch's schedules
_MAY_BE_INFINITE = frozenset({"max_grad_norm", "min_coeff", "max_coeff"})
_DIVISORS = frozenset({"step_size", "T_max"})

#: name of a parameter in other libraries, in lower case without underscores -> its names here, the likeliest first
_OTHER_NAMES = {
    "learningrate": ("lr", "max_lr", "warmup_max_lr"),
    "baselr": ("lr",),
    "stepsize": ("lr",),
    "beta": ("betas", "momentum"),
    "beta1": ("betas", "momentum"),
    "beta2": ("betas",),
    "rho": ("alpha",),
    "epsilon": ("eps",),
    "decay": ("weight_decay",),
    "wd": ("weight_decay",),
    "l2": ("weight_decay",),
    "adamwmode": ("adam_w_mode",),
    "warmup": ("warmup_num_steps",),
    "numwarmupsteps": ("warmup_num_steps",),
    "numtrainingsteps": ("total_num_steps",),
    "maxsteps": ("total_num_steps",),
}


def suggestion(name: str, known: Collection[str]) -> str:
    """Return ' Did you mean "X"?' with the nearest of `known`, ignoring case, or ''."""
    by_lower = {word.lower(): word for word in known}
    others = _OTHER_NAMES.get(re.sub(r"[\W_]", "", name).lower(), ())
    near = [word for word in others if word in by_lower]
    near = near or difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f' Did you mean "{by_lower[near[0]]}"?' if near else ""


def without_auto(arguments: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return `arguments` without those that are "auto", so that their defaults apply.

    Raises:
        ConfigError: `lr` is "auto": there is no general default for a learning rate.
    """
    if _is_auto(arguments.get("lr")):
        raise _not_filled_in(f"{path}.lr")
    return {key: value for key, value in arguments.items() if not _is_auto(value)}


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _not_filled_in(path: str) -> ConfigError:
    return ConfigError(f'{path}: found "auto", which Hugging Face fills in; without it give a value')


def construct(
    cls: type, first: Any, arguments: Mapping[str, Any], path: str, name: str, documented: Collection[str] = ()
) -> Any:
    """Return `cls(first, **arguments)`. Every error in `arguments` raises a ConfigError that starts with its key.

    "auto" means the default of the parameter, if it has one and is not a learning rate.

    `path` is the config section of the arguments ("optimizer.params"), and `name` the name in the config. Lists become
    tuples if the default is a tuple. `documented` are keys that chose `cls` and are no longer in `arguments`; error
    messages list them too.
    """
    label, checked = checked_arguments(cls, arguments, path, name, documented)
    try:
        return cls(first, **checked)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}") from error
    except (TypeError, ValueError, RuntimeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path}: {label} refused {checked!r}: {error}") from error


def checked_arguments(
    cls: type, arguments: Mapping[str, Any], path: str, name: str, documented: Collection[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the label of `cls` for messages, and the checked arguments for `construct`.

    Raises:
        ConfigError: an argument does not fit the signature of `cls`.
    """
    label = cls.__name__ if cls.__name__.lower() == name.lower() else f"{name} ({cls.__name__})"
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # without the optimizer's params
    accepted = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    checked = {}
    for key, value in arguments.items():
        if key not in accepted:
            names = sorted({*accepted, *documented})
            raise ConfigError(f"{path}.{key}: {label} has no such parameter.{suggestion(key, names)} "
                              f"It accepts {', '.join(names)}")  # fmt: skip
        if not _is_auto(value):
            checked[key] = _checked_value(value, accepted[key], f"{path}.{key}")
        elif key == "lr" or accepted[key].default is inspect.Parameter.empty:
            raise _not_filled_in(f"{path}.{key}")
    missing = [p.name for p in accepted.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ConfigError(f"{path}.{missing[0]}: found nothing, but {label} needs it; give it a value")
    return label, checked


def _checked_value(value: Any, parameter: inspect.Parameter, path: str) -> Any:
    """Check `value` against the parameter's default and annotation, as far as they define its type, and return it."""
    default, words = parameter.default, set(re.findall(r"\w+", str(parameter.annotation)))
    if isinstance(default, tuple) and default and all(_is_number(item) or item is None for item in default):
        fits = isinstance(value, (list, tuple)) and len(value) == len(default)
        pairs = zip(value, default, strict=True) if fits else ()
        if not fits or not all(_is_number(each) or each is own is None for each, own in pairs):
            lax = " (the first may be null)" if default[0] is None else ""
            wanted = f"a list of {counted(len(default), 'number')}{lax}"
            raise ConfigError(f"{path}: found {value!r}, but it must be {wanted}")
        _check_finite(value, parameter.name, path)
        return tuple(value)
    allowed = _allowed(default, words)
    if allowed and not any(_FITS[kind](value) for kind in allowed):
        raise ConfigError(f"{path}: found {value!r}, but it must be {' or '.join(allowed)}")
    _check_finite(value, parameter.name, path)
    if parameter.name in _DIVISORS and _is_number(value) and not value > 0:
        raise ConfigError(f"{path}: found {value!r}, but it must be more than 0")
    return value


def _check_finite(value: Any, name: str, path: str) -> None:
    """Refuse inf and nan, which would cause nan weights some steps later."""
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, float) and not math.isfinite(each) and not (name in _MAY_BE_INFINITE and each > 0):
            wanted = "a finite number" if each is value else "finite numbers"
            raise ConfigError(f"{path}: found {value!r}, but it must be {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


_FITS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, (bool, Tensor)),
    "a number": _is_number,
    "a list of numbers, one per group": lambda value: isinstance(value, (list, tuple)) and all(map(_is_number, value)),
    "a string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
}


def _allowed(default: Any, words: set[str]) -> list[str]:
    """Return the keys of `_FITS` that a parameter's default or annotation (`words`) allows; [] if unknown."""
    if isinstance(default, bool) or (default is None and "bool" in words):
        kinds = ["true or false"]
    elif isinstance(default, str):
        kinds = ["a string"]
    elif isinstance(default, (int, float)) or (words & {"int", "float"} and not words & {"str", "dict", "tuple"}):
        kinds = ["a number"]
        # a schedule accepts one number, or one per param group
        if words & {"Sequence", "list", "Iterable"}:
            kinds.append("a list of numbers, one per group")
    else:
        return []
    return [*kinds, "null"] if default is None or "None" in words else kinds
