"""Which compiled operator serves these tensors? Called by the functions of `quantizer` and `transformer`.

May import `ops.kernel_optimizer` and below. A kernel serves when it was registered as torch operators (its builder
names an `op_namespace`), the tensors are plain ones of the current accelerator in fp32, bf16 or fp16, and no gradient
is needed: these operators have none. Otherwise the caller runs its torch reference, which has one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import registry
from deepspeed.ops.kernel_optimizer import FLOATS, PLAIN


def operator_for(op: str, name: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """The torch operator `name` of the kernel of `op`, or None: then the caller runs its torch reference.

    Args:
        op: as `registry.kernel` takes it, for example "quantizer".
        name: the operator in the kernel's namespace. Its schema is in the caller's docstring.
        tensors: every floating tensor that the operator would get; None for one that was omitted.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return None
    device_type = given[0].device.type
    if not all(type(one) in PLAIN and one.dtype in FLOATS and one.device.type == device_type for one in given):
        return None
    namespace = _namespace(op, device_type)
    return None if namespace is None else getattr(getattr(torch.ops, namespace), name, None)


@torch.compiler.assume_constant_result
def _namespace(op: str, device_type: str) -> str | None:
    """Where the operators of `op` are registered, if it has a kernel for tensors of `device_type`."""
    if device_type != torch.device(get_accelerator().device_name()).type or registry.kernel(op) is None:
        return None
    return getattr(registry.resolve(op).builder, "op_namespace", None)
