"""Checks what a user's JSON gives for a constructor, so that a wrong key or type is named before the call.

Used by `factory.py` for `optimizer.params` and `scheduler.params`.
"""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from deepspeed.config.base import AUTO
from deepspeed.errors import ConfigError, counted

#: parameters that say "no bound" by infinity, and those of torch's schedules by which a step divides
_MAY_BE_INFINITE = frozenset({"max_grad_norm", "min_coeff", "max_coeff"})
_DIVISORS = frozenset({"step_size", "T_max"})

#: what other libraries call a parameter, without regard to case and underscores: its names here, the likeliest first
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
    """' Did you mean "X"?' with the nearest of `known`, without regard to case, or ''."""
    by_lower = {word.lower(): word for word in known}
    others = _OTHER_NAMES.get(re.sub(r"[\W_]", "", name).lower(), ())
    near = [word for word in others if word in by_lower]
    near = near or difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f' Did you mean "{by_lower[near[0]]}"?' if near else ""


def without_auto(arguments: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`arguments` but for those that still say "auto", whose defaults hold; a learning rate has none that fits all.

    Raises:
        ConfigError: for "auto" as `lr`.
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
    """`cls(first, **arguments)`; for every fault in `arguments` a ConfigError that starts with its key.

    "auto" stands for the default of the parameter, where it has one and is no learning rate.

    `path` is the section of the arguments in the config ("optimizer.params"), and `name` the name there that `cls` was
    chosen for. Lists for tuples become tuples. `documented`: keys which chose `cls` and are no longer in `arguments`,
    to name beside those of `cls`.
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
    """The label of `cls` for messages, and the arguments that `construct` calls it with.

    Raises:
        ConfigError: as `construct`, for what the signature of `cls` tells.
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
    """`value` if it fits what the parameter's default and annotation tell; what they do not tell is not checked."""
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
    """Refuse numbers that are none: they train to nan, some steps later."""
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
    """Return the kinds of `_FITS` that a parameter takes by its default or its annotation's `words`; empty: unknown."""
    if isinstance(default, bool) or (default is None and "bool" in words):
        kinds = ["true or false"]
    elif isinstance(default, str):
        kinds = ["a string"]
    elif isinstance(default, (int, float)) or (words & {"int", "float"} and not words & {"str", "dict", "tuple"}):
        kinds = ["a number"]
        # a schedule takes one number, or one for each param group
        if words & {"Sequence", "list", "Iterable"}:
            kinds.append("a list of numbers, one per group")
    else:
        return []
    return [*kinds, "null"] if default is None or "None" in words else kinds
