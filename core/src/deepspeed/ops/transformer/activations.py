"""Fused activations: gelu(x), gelu(x + bias), and activation(gate) * up of a gated feed-forward layer.

    "none", "gelu"       x Phi(x),  Phi(x) = (1 + erf(x / sqrt(2))) / 2             arXiv 1606.08415; GEGLU 2002.05202
    "tanh", "gelu_tanh"  x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2          arXiv 1606.08415
    "silu"               x / (1 + exp(-x))                                          SwiGLU: arXiv 2002.05202

Arithmetic is fp32, rounded once to the dtype of x or gate.
"""

import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import FLOATS, operator_for

_GELU_OP = "transformer_inference"
GELU_FORMS = ("none", "tanh")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute gelu of every element. Operator: `gelu(x, tanh)`.

    Args:
        x: any shape, in fp32, bf16 or fp16.
        approximate: "none" or "tanh", as in torch.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ConfigError: `approximate` is unknown, or x is not floating-point.

    >>> import torch
    >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1587,  0.0000,  0.8413])
    """
    _check(x, approximate)
    if (kernel := operator_for(_GELU_OP, "gelu", x)) is not None:
        return kernel(x, approximate == "tanh")
    return gelu_reference(x, approximate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Compute gelu(x + bias) without rounding the sum. Operator: `bias_gelu(x, bias, tanh)`.

    Called after a linear layer, which then omits its bias.

    Args:
        x: (..., N) in fp32, bf16 or fp16.
        bias: (N,) in x's dtype or fp32.
        approximate: see `gelu`.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ConfigError: see `gelu`; also if the bias has another shape.
    """
    _check(x, approximate)
    if x.dim() == 0 or bias.shape != x.shape[-1:]:
        raise ConfigError(
            f"bias: found shape {tuple(bias.shape)}, but it must be the last dimension of x, {tuple(x.shape)}"
        )
    if (kernel := operator_for(_GELU_OP, "bias_gelu", x, bias)) is not None:
        return kernel(x, bias, approximate == "tanh")
    return bias_gelu_reference(x, bias, approximate)


def gelu_reference(x: Tensor, approximate: str) -> Tensor:
    """The torch reference of `gelu`."""
    return F.gelu(x.float(), approximate=approximate).to(x.dtype)


def bias_gelu_reference(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """The torch reference of `bias_gelu`."""
    return F.gelu(x.float() + bias.float(), approximate=approximate).to(x.dtype)


def _check(x: Tensor, approximate: str) -> None:
    if approximate not in GELU_FORMS:
        raise ConfigError(f"approximate: found {approximate!r}, but it must be one of {', '.join(GELU_FORMS)}")
    if not x.is_floating_point():
        raise ConfigError(f"x: found dtype {x.dtype}, but it must be floating")


_GATE_OP = "inference_core_ops"
# name -> number for the operator
GATE_FORMS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def gated_activation(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Compute activation(gate) * up. Operator: `gated_activation(gate, up, activation)`, with a number from GATE_FORMS.

    Called between the two linear layers of a gated feed-forward. The halves of one tensor (`both.chunk(2, -1)`), the
    output of a combined linear layer, need no copy.

    Args:
        gate, up: tensors of the same shape and dtype, in fp32, bf16 or fp16.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        A contiguous tensor of their shape and dtype.

    Raises:
        ConfigError: `activation` is unknown, or shapes or dtypes differ; the message has the value found.

    >>> import torch
    >>> gated_activation(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([5.0, 2.0, 2.0]))
    tensor([ 0.0000,  1.4621, -0.5379])
    """
    if activation not in GATE_FORMS:
        raise ConfigError(f"activation: found {activation!r}, but it must be one of {', '.join(GATE_FORMS)}")
    if gate.dtype not in FLOATS:
        raise ConfigError(f"gate: found dtype {gate.dtype}, but it must be float32, bfloat16 or float16")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ConfigError(
            f"up: found {up.dtype} of shape {tuple(up.shape)}, but it must be as gate is, {gate.dtype} of shape "
            f"{tuple(gate.shape)}"
        )
    if (kernel := operator_for(_GATE_OP, "gated_activation", gate, up)) is not None:
        return kernel(gate, up, GATE_FORMS[activation])
    return gated_activation_reference(gate, up, activation)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The torch reference of `gated_activation`."""
    wide = gate.float()
    gated = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate=_GELU[activation])
    return (gated * up.float()).to(gate.dtype)


_GELU = {"gelu": "none", "gelu_tanh": "tanh"}
