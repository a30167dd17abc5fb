"""Builders of the host kernels in `csrc/`. Each op has one file here and one folder of C++ in `csrc/`.

May import `deepspeed.ops.op_builder`. Read next: `cpu_op_builder.py` (the common base), then `adam.py`. To add an op,
add a line to `_MODULES`.
"""

import importlib
from typing import Any

from ds_ext_cpu.op_builder.cpu_op_builder import CPUOpBuilder, cpu_kernel_include, cpu_kernel_path

__all__ = ["CPUOpBuilder", "builders", "cpu_kernel_include", "cpu_kernel_path"]

# builder class -> module of this package
_MODULES = {
    "CPUAdamBuilder": "adam",
    "FusedAdamBuilder": "adam",
    "CPULionBuilder": "lion",
    "FusedLionBuilder": "lion",
    "CPUAdagradBuilder": "adagrad",
    "CPULambBuilder": "lamb",
    "FusedLambBuilder": "lamb",
    "QuantizerBuilder": "quantizer",
    "InferenceBuilder": "inference",
    "InferenceCoreBuilder": "inference_core",
    "RaggedOpsBuilder": "ragged",
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "comm",
    "HalfMatmulBuilder": "half_matmul",
}


def builders() -> dict[str, type]:
    """Return the builder classes by name, for the hook `ds_op_builders`."""
    return {name: __getattr__(name) for name in _MODULES}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
