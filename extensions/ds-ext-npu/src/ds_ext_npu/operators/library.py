"""Registers the functions of `inference.py` as the torch operators `torch.ops.ds_npu.*`, which core calls.

The operators are registered only for tensors on the device; torch itself refuses host tensors. Like compiled kernels,
they have no backward: core runs its references if a gradient is needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.ops.fakes import like_first, register_fakes, two_like_first
from torch import Tensor

from ds_ext_npu.operators import inference

NAMESPACE = "ds_npu"
_DEVICE_KEY = "PrivateUse1"  # torch's dispatch key for devices of vendor packages

_SCHEMAS = (
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    "rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor",
    "rms_norm_residual(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)",
    "gelu(Tensor x, bool tanh) -> Tensor",
    "bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor",
    "rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, int seq_dim) -> Tensor",
)


@functools.cache
def operators() -> Any:
    """Return `torch.ops.ds_npu`; the first call registers the operators. Called by the builder's `load`."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema in _SCHEMAS:
        name = library.define(schema)
        empty = two_like_first if schema.endswith("(Tensor, Tensor)") else like_first
        library.impl(name, _unless_empty(getattr(inference, name), empty), _DEVICE_KEY)
        register_fakes(NAMESPACE, name)
    _kept.append(library)
    return getattr(torch.ops, NAMESPACE)


_kept: list[Any] = []  # torch drops the operators of a Library without references


def _unless_empty(compute: Callable[..., Any], empty: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compute` to call `empty` if `x` has no elements, because the vendor may refuse such tensors."""

    def run(x: Tensor, *others: Any) -> Any:
        return compute(x, *others) if x.numel() else empty(x, *others)

    return run
