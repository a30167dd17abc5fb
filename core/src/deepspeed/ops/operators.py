"""Finds the compiled operator for the tensors of a call in `quantizer` or `transformer`.

May import `ops.optimizer` and below. An operator is used if it is a registered torch operator (its builder sets
`op_namespace`), the tensors are plain fp32, bf16 or fp16 tensors of the current accelerator, and no gradient is needed,
because these operators have no backward. Otherwise the caller runs its torch reference, which has a backward.
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
    """Return the torch operator `name` of `op`, or None if the caller must run its torch reference.

    Args:
        op: a name for `registry.kernel`, for example "quantizer".
        name: the operator in the kernel's namespace. Its schema is in the caller's docstring.
        tensors: every floating-point argument of the operator; None for an omitted one.
    """
    needs_none, device_type = torch.is_grad_enabled(), None
    for one in tensors:  # an explicit loop, because it runs for every operator of every layer
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
    """Return the namespace with the operators of `op`; None if there is none for `device_type`."""
    if device_type != _device_type(get_accelerator().device_name()):
        return None
    return getattr(registry.loaded(op).builder, "op_namespace", None)


# torch.compiler.assume_constant_result sets this, but calling it imports torch's compiler: 1.1 s in every process.
_namespace._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _device_type(name: str) -> str:
    """Return the device type of an accelerator's device name."""
    return torch.device(name).type
