"""Builders of the GPU kernels in `csrc/`. Each op has one file here and one folder of CUDA C++ in `csrc/`.

May import `deepspeed.ops.op_builder`. Read next: `cuda_op_builder.py` (the common base), `toolkit.py` (finds nvcc),
`architectures.py` (the target GPUs), then `adam.py`. To add an op, add a line to `_MODULES`.
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
    """Return the builder classes by name, for the hook `ds_op_builders`."""
    return {name: __getattr__(name) for name in _MODULES}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
