"""Names of a package whose objects are in other modules, each loaded on first use (PEP 562).

`deepspeed/__init__.py` and the packages of old addresses use it. `_absent` handles names that DeepSpeed has and no
table here. May import nothing else of the project.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed._address import resolve


def forward(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of `package`.

    Args:
        package: its `__name__`.
        names: public name -> address for `resolve`.
    """

    def get(name: str) -> Any:
        if name not in names:
            if name.startswith("_"):
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            from deepspeed._absent import absent_name  # imported late, because it reads a table of names

            return absent_name(package, name)
        value = resolve(names[name])
        vars(sys.modules[package])[name] = value
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing
