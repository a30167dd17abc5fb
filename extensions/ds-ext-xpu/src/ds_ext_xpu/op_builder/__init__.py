"""Builders of the kernels in `csrc/`: each op has a file here and a folder with SYCL sources there.

May import `deepspeed.ops.op_builder`. Read next: `sycl_op_builder.py` (the base class), then `adam.py`. To add an op,
add a line to `_MODULES`.
"""

import importlib
from typing import Any

from ds_ext_xpu.op_builder.sycl_op_builder import SYCLOpBuilder, sycl_kernel_include, sycl_kernel_path

__all__ = ["SYCLOpBuilder", "builders", "sycl_kernel_include", "sycl_kernel_path"]

# builder class -> module of this package
_MODULES = {
    "FusedAdamBuilder": "adam",
    "QuantizerBuilder": "quantizer",
    "InferenceBuilder": "inference",
}


def builders() -> dict[str, type]:
    """Return builder name -> class, for the hook `ds_op_builders`."""
    return {name: __getattr__(name) for name in _MODULES}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
