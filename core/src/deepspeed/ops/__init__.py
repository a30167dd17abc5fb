"""Operators with DeepSpeed's names, each with a torch reference; extensions bring the kernels.

May import `accelerator` and below. Each op is a package (`adam`, `adagrad`, `lion`, `lamb`, `muon`, `quantizer`,
`transformer`), loaded when it is first used: `import deepspeed.ops` alone imports no torch. Read `adam/` first (an
optimizer and its reference), then `registry.py` (where a kernel comes from), `op_builder/` (how one is made).

`__compatible_ops__` says for each op whether it has a kernel for the current accelerator, computed when it is read.
"""

import importlib
from typing import Any

from deepspeed._absent import complete

_PACKAGES = (
    *("adagrad", "adam", "aio", "fp_quantizer", "lamb", "lion", "muon", "op_builder", "quantizer", "registry"),
    *("sparse_attention", "transformer"),
)

__all__ = list(_PACKAGES)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"deepspeed.ops.{name}")
    if name == "__compatible_ops__":
        from deepspeed.ops import registry

        return registry.compatible_ops()
    raise AttributeError(f"module 'deepspeed.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__compatible_ops__"])


complete(__name__)
