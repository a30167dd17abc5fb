"""Operators with DeepSpeed's names. Each has a torch reference; extensions provide the kernels.

May import `accelerator` and below. Each op is a package (`adam`, `adagrad`, `lion`, `lamb`, `muon`, `quantizer`,
`transformer`) that is imported on first use: `import deepspeed.ops` alone does not import torch. Read `adam/` first (an
optimizer and its reference), then `registry.py` (where a kernel comes from), `op_builder/` (how a kernel is built).

`__compatible_ops__` maps each op to whether it has a kernel for the current accelerator. It is computed when read.
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
