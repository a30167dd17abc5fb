"""Names of one package that live elsewhere, each loaded when it is first used (PEP 562).

Used by `deepspeed/__init__.py` and by the packages of old addresses. What is in neither table but in DeepSpeed is asked
of `_absent`. May import nothing else of the project.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed._address import resolve


def forward(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of `package`.

    Args:
        package: its `__name__`.
        names: public name -> address, as `resolve` takes it.
    """

    def get(name: str) -> Any:
        if name not in names:
            if name.startswith("_"):
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            from deepspeed._absent import absent_name  # late: it reads a table of names

            return absent_name(package, name)
        value = resolve(names[name])
        vars(sys.modules[package])[name] = value
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing
