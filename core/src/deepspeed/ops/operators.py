"""The functions of `quantizer` and `transformer` ask here which compiled operator serves their tensors.

May import `ops.optimizer` and below. A kernel serves when it was registered as torch operators (its builder
names an `op_namespace`), the tensors are plain ones of the current accelerator in fp32, bf16 or fp16, and no gradient
is needed: these operators have none. Otherwise the caller runs its torch reference, which has one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import registry
from deepspeed.ops.optimizer import FLOATS, PLAIN


def operator_for(op: str, name: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """The torch operator `name` of the kernel of `op`, or None: then the caller runs its torch reference.

    Args:
        op: as `registry.kernel` takes it, for example "quantizer".
        name: the operator in the kernel's namespace. Its schema is in the caller's docstring.
        tensors: every floating tensor that the operator would get; None for one that was omitted.
    """
    needs_none, device_type = torch.is_grad_enabled(), None
    for one in tensors:  # written out, because it runs for every operator of every layer
        if one is None:
            continue
        if type(one) not in PLAIN or one.dtype not in FLOATS or (needs_none and one.requires_grad):
            return None
        if device_type is None:
            device_type = one.device.type
        elif one.device.type != device_type:
            return None
    namespace = _namespace(op, device_type) if device_type is not None else None
    return None if namespace is None else getattr(getattr(torch.ops, namespace), name, None)


def _namespace(op: str, device_type: str) -> str | None:
    """Return the namespace that has the operators of `op`; None if it has none for tensors of `device_type`."""
    if device_type != _device_type(get_accelerator().device_name()):
        return None
    return getattr(registry.loaded(op).builder, "op_namespace", None)


# What torch.compiler.assume_constant_result sets: calling that imports torch's compiler, 1.1 s of every process.
_namespace._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _device_type(name: str) -> str:
    """The kind of device that an accelerator's device name names."""
    return torch.device(name).type
