"""Optimizers and learning-rate schedules by name, gradient norms, and what the engine must know of an optimizer.

May import `ops` and below. Read `factory.py` first; then `lr_schedules.py` and `norm.py`. Names load on first use.
"""

import importlib
from typing import Any

_NAMES = {
    "create_optimizer": "deepspeed.optim.factory",
    "create_scheduler": "deepspeed.optim.factory",
    "is_elementwise": "deepspeed.optim.traits",
    "is_tested_with_zero": "deepspeed.optim.traits",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'deepspeed.optim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
