"""Names of one package that live elsewhere, each loaded when it is first used (PEP 562).

Used by `deepspeed/__init__.py` and by the packages of old addresses. May import nothing of the project.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def resolve(address: str) -> Any:
    """The object at "package.module:name", or the module at "package.module"."""
    module_name, _, attribute = address.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, attribute) if attribute else module


def forward(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of `package`.

    Args:
        package: its `__name__`.
        names: public name -> address, as `resolve` takes it.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = resolve(names[name])
        vars(sys.modules[package])[name] = value
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing
