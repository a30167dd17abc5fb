"""Builders of the GPU kernels in `csrc/`: one file per op here, beside one folder of CUDA C++ there.

May import `deepspeed.ops.op_builder`. Read next: `cuda_op_builder.py` (what they share), `toolkit.py` (which nvcc),
`architectures.py` (for which GPUs), then `adam.py`; to add an op, add a line to `_MODULES`.
"""

import importlib
from typing import Any

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_include, cuda_kernel_path

__all__ = ["CUDAOpBuilder", "builders", "cuda_kernel_include", "cuda_kernel_path"]

# builder class -> module of this package
_MODULES = {
    "FusedAdamBuilder": "adam",
    "FusedLambBuilder": "lamb",
    "FusedLionBuilder": "lion",
    "QuantizerBuilder": "quantizer",
    "InferenceBuilder": "inference",
    "InferenceCoreBuilder": "inference_core",
    "RandomLTDBuilder": "random_ltd",
    "UtilsBuilder": "flatten",
}


def builders() -> dict[str, type]:
    """Builder name -> class, for the hook `ds_op_builders`."""
    return {name: __getattr__(name) for name in _MODULES}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
