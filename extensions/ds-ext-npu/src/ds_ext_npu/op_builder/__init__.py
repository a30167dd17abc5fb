"""Builders of ops that use the vendor's operators (nothing to compile), and the base class for your own C++ kernels.

May import `deepspeed.ops.op_builder` and `ds_ext_npu.vendor`. Read next: `vendor_op_builder.py`, then `adam.py`;
`npu_op_builder.py` is for ACLNN sources. To add an op, add a line to `_MODULES`.
"""

import importlib
from typing import Any

from ds_ext_npu.op_builder.npu_op_builder import NPUOpBuilder, ascend_kernel_include, ascend_kernel_path

__all__ = ["NPUOpBuilder", "ascend_kernel_include", "ascend_kernel_path", "builders"]

# builder class -> module of this package
_MODULES = {"FusedAdamBuilder": "adam", "InferenceBuilder": "inference"}


def builders() -> dict[str, type]:
    """Return builder name -> class, for the hook `ds_op_builders`."""
    return {name: __getattr__(name) for name in _MODULES}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
