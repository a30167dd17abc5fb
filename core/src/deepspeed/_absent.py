"""Names of features that are not here yet: they import, and refuse when they are used.

The generated modules of `compatibility.MODULES` take their names from here. A class can be subclassed and given to
`isinstance`; making an object of it raises `ConfigError`, as calling a function does. May import `errors` and
`compatibility`.
"""

import importlib
import sys
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, NoReturn

from deepspeed._forward import resolve
from deepspeed.compatibility import FEATURES, MODULES
from deepspeed.errors import ConfigError, DeepSpeedError


class _AbsentMeta(ABCMeta):  # not plain `type`, so that a subclass may derive from an abstract class too
    _feature: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise AttributeError(FEATURES[cls._feature].explain(f"{_address(cls)}.{name}"))


class Absent(metaclass=_AbsentMeta):
    """Base of every class that is not here yet. No object of it or of a subclass can be made."""

    _feature = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        absent = next(base for base in cls.__mro__ if Absent in base.__bases__)
        raise ConfigError(FEATURES[cls._feature].explain(_address(absent)))


def absent(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a module of `compatibility.MODULES`, by its `__name__`."""
    record = MODULES[package.removeprefix("deepspeed.")]

    def get(name: str) -> Any:
        if name == "__all__":
            return record.names()
        value = _make(package, name)
        vars(sys.modules[package])[name] = value
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *record.names()})

    return get, listing


def _make(package: str, name: str) -> Any:
    record = MODULES[package.removeprefix("deepspeed.")]
    if name in record.forwards:
        return resolve(f"deepspeed.{record.forwards[name]}")
    if name in record.classes:
        return _AbsentMeta(name, (Absent,), {"__module__": package, "_feature": record.feature})
    if name in record.errors:
        return type(name, (DeepSpeedError,), {"__module__": package})
    if name in record.functions:
        return _function(package, name, record.feature)
    if f"{package}.{name}".removeprefix("deepspeed.") in MODULES:
        return importlib.import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def _function(package: str, name: str, feature: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(FEATURES[feature].explain(f"{package}.{name}"))

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = package, f"Not in this version: {FEATURES[feature].title}."
    return refuse


def _address(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
