"""A linear layer for few rows, as a step of generation has them: bound by the reading of the weight, not by arithmetic.

y = x w^T + bias           arithmetic is fp32, rounded once to x's dtype
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.ops.operators import operator_for

OP = "inference_core_ops"
# Rows of x up to which the kernel is called: then every weight is read once and used few times, in less time than
# torch's product takes. With more rows torch's is bound by arithmetic. Measured by benchmarks/inference_kernels.py.
MOST_ROWS = 16
_DTYPES = (torch.float32, torch.bfloat16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with a kernel for up to `MOST_ROWS` rows of x. Operator: `linear(x, weight, bias)`.

    Args:
        x: (..., in).
        weight: (out, in), as `torch.nn.Linear` has it; the kernel takes fp32 and bf16, as x has.
        bias: (out,).

    Returns:
        (..., out), of x's dtype.

    Raises:
        RuntimeError: torch's, for shapes and dtypes that do not fit.

    >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([0.0, 0.5]))
    tensor([ 1.0000, 11.5000])
    """
    if (kernel := linear_kernel(x, weight, bias)) is not None:
        return kernel(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """The operator that `linear` calls for tensors like these, or None."""
    is_few = weight.dim() == 2 and x.dim() > 0 and x.numel() <= MOST_ROWS * weight.shape[1]
    if is_few and x.dtype in _DTYPES and weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        if x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1]):
            return operator_for(OP, "linear", x, weight, bias)
    return None
