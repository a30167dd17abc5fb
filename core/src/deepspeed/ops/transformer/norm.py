"""Layer norm and RMS norm over the last dimension, optionally fused with the residual addition before them.

    layer norm    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      var: divided by N     arXiv 1607.06450
    RMS norm      y = x / sqrt(mean(x^2) + eps) * weight                                           arXiv 1910.07467

Arithmetic is fp32, rounded once to x's dtype. The residual variants first round `x + residual` to x's dtype, like two
separate ops, and also return this sum, which is the input of the next residual addition.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import operator_for

OP = "transformer_inference"
# On the host, torch computes fp32 layer norm of more elements than this, which exceed the second-level cache. Both
# implementations are then memory-bound (1.0 to 1.3x the time of a negation of the same size), and neither is faster in
# all runs. Measured by benchmarks/host_ops.py.
_CACHED_FP32 = 1 << 18


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Compute layer norm of every row of `x`. Operator: `layer_norm(x, weight, bias, eps)`.

    Args:
        x: (..., N) in fp32, bf16 or fp16.
        weight, bias: (N,) in x's dtype or fp32; None for 1 and 0.
        eps: added to the variance.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ConfigError: a shape does not fit; the message names the argument.

    >>> layer_norm(torch.tensor([[1.0, 3.0], [0.0, 8.0]]), eps=0.0)
    tensor([[-1.,  1.],
            [-1.,  1.]])
    """
    _check_rows(x, weight, bias)
    if not _bound_by_memory(x) and (kernel := operator_for(OP, "layer_norm", x, weight, bias)) is not None:
        return kernel(x, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)


def layer_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(s), s) for s = x + residual. Operator: `layer_norm_residual(x, residual, weight, bias, eps)`.

    Args:
        residual: a tensor of x's shape and dtype. The other arguments are as in `layer_norm`.

    Returns:
        Two tensors of x's shape and dtype.

    Raises:
        ConfigError: see `layer_norm`; also if the residual has another shape or dtype.
    """
    _check_rows(x, weight, bias)
    _check_residual(x, residual)
    kernel = None if _bound_by_memory(x) else operator_for(OP, "layer_norm_residual", x, residual, weight, bias)
    if kernel is not None:
        return kernel(x, residual, weight, bias, eps)
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Compute RMS norm of every row of `x`. Operator: `rms_norm(x, weight, eps)`.

    Args:
        x: (..., N) in fp32, bf16 or fp16.
        weight: (N,) in x's dtype or fp32; None for 1.
        eps: added to the mean square.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ConfigError: a shape does not fit; the message names the argument.

    >>> rms_norm(torch.tensor([[1.0, -1.0], [3.0, 3.0]]), eps=0.0)
    tensor([[ 1., -1.],
            [ 1.,  1.]])
    """
    _check_rows(x, weight, None)
    if (kernel := operator_for(OP, "rms_norm", x, weight)) is not None:
        return kernel(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s), s) for s = x + residual. Operator: `rms_norm_residual(x, residual, weight, eps)`.

    Args:
        residual: a tensor of x's shape and dtype. The other arguments are as in `rms_norm`.

    Returns:
        Two tensors of x's shape and dtype.

    Raises:
        ConfigError: see `rms_norm`; also if the residual has another shape or dtype.
    """
    _check_rows(x, weight, None)
    _check_residual(x, residual)
    if (kernel := operator_for(OP, "rms_norm_residual", x, residual, weight)) is not None:
        return kernel(x, residual, weight, eps)
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


# ----- the torch reference -------------------------------------------------------------------------------------------


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The torch reference of `layer_norm`."""
    normed = F.layer_norm(x.float(), x.shape[-1:], _float(weight), _float(bias), eps)
    return normed.to(x.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The torch reference of `rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _bound_by_memory(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and x.numel() > _CACHED_FP32


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


# ----- checks --------------------------------------------------------------------------------------------------------


def _check_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ConfigError(
            f"x: found {x.dtype} of shape {tuple(x.shape)}, but it must be floating, with a last dimension"
        )
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and one.shape != x.shape[-1:]:
            raise ConfigError(
                f"{name}: found shape {tuple(one.shape)}, but it must be {tuple(x.shape[-1:])}, the last dimension of x"
            )


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ConfigError(
            f"residual: found {residual.dtype} of shape {tuple(residual.shape)}, but it must be as x is, {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
