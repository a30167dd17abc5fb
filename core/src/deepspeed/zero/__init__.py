"""ZeRO: gradients, optimizer states and parameters divided among ranks.

May import `precision`, `optim`, `parallel`, `comm` and below. Read `strategy.py` (the contract, and stage 0), then
`stage1.py` and `stage2.py` beside it, `layout.py`, `bucket.py`, `backward_window.py`. Names load on first use.
"""

import importlib
from typing import Any

_NAMES = {
    "GatheredParameters": "deepspeed.zero.gather",
    "Init": "deepspeed.zero.construct",
    "register_external_parameter": "deepspeed.zero.gather",
    "unregister_external_parameter": "deepspeed.zero.gather",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'deepspeed.zero' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value
