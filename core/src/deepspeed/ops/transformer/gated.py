"""The gate of a gated feed-forward layer in one pass: activation(gate) * up.

    "silu"        x / (1 + exp(-x))                                              SwiGLU: arXiv 2002.05202
    "gelu"        x Phi(x), by erf                                               GEGLU, the same paper
    "gelu_tanh"   x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

Arithmetic is fp32, rounded once to gate's dtype.
"""

import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import FLOATS, operator_for

OP = "inference_core_ops"
# name -> the operator's number
FORMS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def gated_activation(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up. Operator: `gated_activation(gate, up, activation)`, with the number of the form.

    Called between the two linear layers of a gated feed-forward. Halves of one tensor, as one linear layer of gate and
    up gives them (`both.chunk(2, -1)`), are read where they lie.

    Args:
        gate, up: of one shape and dtype, in fp32, bf16 or fp16.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        A contiguous tensor of their shape and dtype.

    Raises:
        ConfigError: another activation, or the two differ; the message names what was found.

    >>> import torch
    >>> gated_activation(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([5.0, 2.0, 2.0]))
    tensor([ 0.0000,  1.4621, -0.5379])
    """
    if activation not in FORMS:
        raise ConfigError(f"activation: found {activation!r}, but it must be one of {', '.join(FORMS)}")
    if gate.dtype not in FLOATS:
        raise ConfigError(f"gate: found dtype {gate.dtype}, but it must be float32, bfloat16 or float16")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ConfigError(
            f"up: found {up.dtype} of shape {tuple(up.shape)}, but it must be as gate is, {gate.dtype} of shape "
            f"{tuple(gate.shape)}"
        )
    if (kernel := operator_for(OP, "gated_activation", gate, up)) is not None:
        return kernel(gate, up, FORMS[activation])
    return gated_activation_reference(gate, up, activation)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`gated_activation` in torch."""
    wide = gate.float()
    gated = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate=_GELU[activation])
    return (gated * up.float()).to(gate.dtype)


_GELU = {"gelu": "none", "gelu_tanh": "tanh"}
