"""Names that are missing in this version: features, which can be imported but raise when they are used, and members of
DeepSpeed's classes that a class here lacks.

The generated modules of `compatibility.MODULES` get their names from here. A module that has some of DeepSpeed's names
gets the others (`complete`), and an import of a missing module ends here (`AbsentModules`). A missing class can be
subclassed and passed to `isinstance`; creating an object of it raises `ConfigError`, and so does calling a missing
function.

    @absent_members("runtime.pipe.module:PipelineModule")
    class PipelineModule(nn.Module): ...

    module.partitions        AbsentMemberError, an AttributeError, with the reason of the table

`hasattr` is False for such members. Their table is `compatibility.differences`; existing members are found as before.
May import `errors`, `_address` and `compatibility`.
"""

import functools
import importlib
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar

from deepspeed._address import resolve
from deepspeed.compatibility import ENGINE_METHODS, MODULES, differences, feature_of, upstream_names
from deepspeed.errors import AbsentMemberError, ConfigError, DeepSpeedError

_Class = TypeVar("_Class", bound=type)
_ENGINE = "runtime.engine:DeepSpeedEngine"
_NOT_HERE = "Not in this version: "
_ERRORS = ("Error", "Exception")


class _AbsentMeta(ABCMeta):  # not plain `type`, so that a subclass may derive from an abstract class too
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        absent = _first_absent(cls)
        raise AttributeError(feature_of(absent.__module__).explain(f"{_address(absent)}.{name}"))


class Absent(metaclass=_AbsentMeta):
    """`Absent` is the base of every missing class. No object of it or of a subclass can be created."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        absent = _first_absent(cls)
        raise ConfigError(feature_of(absent.__module__).explain(_address(absent)))


class _AbsentModule(ModuleType):
    """A missing module. Its members stay when a submodule of the same name is imported, as in DeepSpeed."""

    def __setattr__(self, name: str, value: object) -> None:
        kind = upstream_names().get(self.__name__, {}).get(name, "")
        if not (isinstance(value, ModuleType) and ":" in kind):  # an address in a module
            super().__setattr__(name, value)


def absent(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a missing module, by its `__name__`."""
    record, listed = MODULES.get(package.removeprefix("deepspeed.")), upstream_names().get(package, {})
    names = sorted({*listed, *(record.names() if record is not None else ())})
    sys.modules[package].__class__ = _AbsentModule

    def get(name: str) -> Any:
        if name == "__all__":
            return names
        if name == "__path__" and _has_modules(package):
            return []
        value = _make(package, name)
        vars(sys.modules[package])[name] = value
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing


def complete(old: str, module: ModuleType | None = None, elsewhere: Mapping[str, str] | None = None) -> None:
    """Add the missing names of DeepSpeed's module `old` to a module of this package.

    Args:
        module: the module; default: the one called `old`.
        elsewhere: names that are in another module -> their address for `resolve`.
    """
    here = module or sys.modules[old]
    first, addresses = vars(here).get("__getattr__"), elsewhere or {}

    def get(name: str) -> Any:
        if name in addresses:
            return resolve(addresses[name])
        try:
            if first is not None:
                return first(name)
        except AttributeError as error:
            if error.name not in (None, name) or name not in upstream_names().get(old, {}):
                raise
        return absent_name(old, name)

    here.__getattr__ = get  # type: ignore[method-assign]


def absent_name(package: str, name: str) -> Any:
    """Return the object of a name of DeepSpeed's module `package`, or a missing object, which raises when it is used.

    Raises AttributeError for any other name.
    """
    if name.startswith("_"):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return _make(package, name)


def is_absent(thing: Any) -> bool:
    """Return whether `thing` raises when it is used."""
    if isinstance(thing, type):
        return issubclass(thing, Absent)
    return isinstance(thing, FunctionType) and (thing.__doc__ or "").startswith(_NOT_HERE)


def is_absent_module(module: ModuleType) -> bool:
    """Return whether a module as a whole is missing."""
    return (module.__doc__ or "").startswith(_NOT_HERE)


def _make(package: str, name: str) -> Any:
    record = MODULES.get(package.removeprefix("deepspeed."))
    kind = upstream_names().get(package, {}).get(name)
    if kind is not None and kind.startswith("deepspeed"):
        return resolve(kind)
    if record is not None:
        if name in record.forwards:
            return resolve(f"deepspeed.{record.forwards[name]}")
        own = {"class": record.classes, "error": record.errors, "def": record.functions}
        kind = next((word for word, names in own.items() if name in names), kind)
    if kind is not None:
        return _refusing(package, name, kind)
    inner = f"{package}.{name}"
    if inner.removeprefix("deepspeed.") in MODULES or inner in upstream_names():
        return importlib.import_module(inner)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


@functools.cache  # one class for all its addresses, so that `is` and `isinstance` recognize it
def _refusing(package: str, name: str, kind: str) -> Any:
    if kind == "error" or (kind == "class" and name.endswith(_ERRORS)):
        error = type(name, (DeepSpeedError,), {"__module__": package})
        return absent_members(f"{package.removeprefix('deepspeed.')}:{name}")(error)
    if kind == "def":
        return _function(package, name)
    return _AbsentMeta(name, (Absent,), {"__module__": package})  # for a constant, too: any use of it raises


def _function(package: str, name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(feature_of(package).explain(f"{package}.{name}"))

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = package, f"{_NOT_HERE}{feature_of(package).title}."
    return refuse


class AbsentModules:
    """`AbsentModules` is the last finder of `sys.meta_path`: DeepSpeed modules that are missing in this version."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in upstream_names():
            return None
        return ModuleSpec(name, cls(), is_package=_has_modules(name))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, for a plain module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"{_NOT_HERE}{feature_of(module.__name__).title}."
        module.__getattr__, module.__dir__ = absent(module.__name__)  # type: ignore[method-assign]


def _has_modules(package: str) -> bool:
    return any(name.startswith(f"{package}.") for name in upstream_names())


def _first_absent(cls: type) -> type:
    return next(base for base in cls.__mro__ if Absent in base.__bases__)


def _address(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def absent_members(*addresses: str) -> Callable[[_Class], _Class]:
    """Make a class raise for the members that it lacks.

    Args:
        addresses: DeepSpeed's classes that the class replaces, below `deepspeed`, with the table's spelling.
    """

    def give(cls: _Class) -> _Class:
        said = {name: text for address in addresses for name, text in _sentences(address).items()}
        said = {name: text for name, text in said.items() if not hasattr(cls, name)}
        for name, text in said.items():
            setattr(cls, name, _Refusal(text))
        if hasattr(cls, "__getattr__"):  # Python calls it after an AttributeError and would raise its error
            cls.__getattr__ = _explaining(cls.__getattr__, said)  # type: ignore[attr-defined]
        return cls

    return give


class _Refusal:
    """`_Refusal` stands for an absent member of a class, and raises when the member is read from class or object.

    An object may be given an attribute of this name.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, owner: object, cls: type | None = None) -> NoReturn:
        raise AbsentMemberError(self._text)


def _explaining(former: Callable[[Any, str], Any], said: Mapping[str, str]) -> Callable[[Any, str], Any]:
    @functools.wraps(former)
    def get(self: Any, name: str) -> Any:
        try:
            return former(self, name)
        except AttributeError:
            if name in said:
                raise AbsentMemberError(said[name]) from None
            raise

    return get


def _sentences(address: str) -> dict[str, str]:
    """Return the error text for each absent member of DeepSpeed's class at `address`, by the member's name."""
    names, reason = differences().get(address, ((), ""))
    cls = address.rpartition(":")[2]
    said = {
        name: f"{name}: this member of DeepSpeed's {cls} is not in this version of ds-core. {reason}" for name in names
    }
    if address == _ENGINE:
        said |= {name: method.explain() for name, method in ENGINE_METHODS.items()}
    return said
