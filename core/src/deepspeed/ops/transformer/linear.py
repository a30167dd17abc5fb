"""A linear layer for few rows, as in a generation step, which is bound by reading the weight, not by arithmetic.

y = x w^T + bias           arithmetic is fp32, rounded once to x's dtype
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.ops.operators import operator_for

OP = "inference_core_ops"
# Maximum rows of x for the kernel, which reads every weight once and is faster than torch here. With more rows, torch's
# product is compute-bound. Measured by benchmarks/inference_kernels.py.
MOST_ROWS = 16
_DTYPES = (torch.float32, torch.bfloat16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with a kernel for up to `MOST_ROWS` rows of x. Operator: `linear(x, weight, bias)`.

    Args:
        x: (..., in).
        weight: (out, in), as in `torch.nn.Linear`. The kernel requires x, weight and bias all in fp32 or all in bf16.
        bias: (out,).

    Returns:
        (..., out) in x's dtype.

    Raises:
        RuntimeError: raised by torch for shapes and dtypes that do not fit.

    >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([0.0, 0.5]))
    tensor([ 1.0000, 11.5000])
    """
    if (kernel := linear_kernel(x, weight, bias)) is not None:
        return kernel(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Return the operator that `linear` calls for these tensors, or None."""
    is_few = weight.dim() == 2 and x.dim() > 0 and x.numel() <= MOST_ROWS * weight.shape[1]
    if is_few and x.dtype in _DTYPES and weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        if x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1]):
            return operator_for(OP, "linear", x, weight, bias)
    return None
