"""gelu, and gelu of a sum with a bias in one pass.

    "none"    y = x Phi(x),  Phi(x) = (1 + erf(x / sqrt(2))) / 2
    "tanh"    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2           both: arXiv 1606.08415

Arithmetic is fp32, rounded once to x's dtype.
"""

import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import operator_for

OP = "transformer_inference"
FORMS = ("none", "tanh")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu of every element. Operator: `gelu(x, tanh)`.

    Args:
        x: any shape, in fp32, bf16 or fp16.
        approximate: "none" or "tanh", as torch names the two forms.

    Returns:
        Of x's shape and dtype.

    Raises:
        ConfigError: another form, or x is not floating.

    >>> import torch
    >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1587,  0.0000,  0.8413])
    """
    _check(x, approximate)
    if (kernel := operator_for(OP, "gelu", x)) is not None:
        return kernel(x, approximate == "tanh")
    return gelu_reference(x, approximate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias); the sum is not rounded in between. Operator: `bias_gelu(x, bias, tanh)`.

    Called after a linear layer without its bias.

    Args:
        x: (..., N) in fp32, bf16 or fp16.
        bias: (N,), of x's dtype or fp32.
        approximate: as in `gelu`.

    Returns:
        Of x's shape and dtype.

    Raises:
        ConfigError: as `gelu`, or the bias has another shape.
    """
    _check(x, approximate)
    if x.dim() == 0 or bias.shape != x.shape[-1:]:
        raise ConfigError(
            f"bias: found shape {tuple(bias.shape)}, but it must be the last dimension of x, {tuple(x.shape)}"
        )
    if (kernel := operator_for(OP, "bias_gelu", x, bias)) is not None:
        return kernel(x, bias, approximate == "tanh")
    return bias_gelu_reference(x, bias, approximate)


def gelu_reference(x: Tensor, approximate: str) -> Tensor:
    """`gelu` in torch."""
    return F.gelu(x.float(), approximate=approximate).to(x.dtype)


def bias_gelu_reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """`bias_gelu` in torch."""
    return F.gelu(x.float() + bias.float(), approximate=approximate).to(x.dtype)


def _check(x: Tensor, approximate: str) -> None:
    if approximate not in FORMS:
        raise ConfigError(f"approximate: found {approximate!r}, but it must be one of {', '.join(FORMS)}")
    if not x.is_floating_point():
        raise ConfigError(f"x: found dtype {x.dtype}, but it must be floating")
