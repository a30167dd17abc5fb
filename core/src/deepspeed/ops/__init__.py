"""Operators: for each a front with DeepSpeed's names and a torch reference; extensions bring the kernels.

May import `accelerator` and below. Each op is a package (`adam`, `adagrad`, `lion`, `lamb`, `muon`), loaded when it is
first used: `import deepspeed.ops` alone imports no torch. Read `adam/` first.
"""

import importlib
from types import ModuleType

_PACKAGES = ("adagrad", "adam", "lamb", "lion", "muon", "op_builder")

__all__ = list(_PACKAGES)


def __getattr__(name: str) -> ModuleType:
    if name not in _PACKAGES:
        raise AttributeError(f"module 'deepspeed.ops' has no attribute {name!r}")
    return importlib.import_module(f"deepspeed.ops.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
