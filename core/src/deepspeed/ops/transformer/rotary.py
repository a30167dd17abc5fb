"""Rotary position embedding rotates pairs of elements of a head by an angle proportional to the position.

    (a, b) -> (a cos - b sin, b cos + a sin),     angle = position * base^(-2i / R),  i = 0 ... R/2 - 1
    half-split (NeoX, Llama)     a = x[i],   b = x[i + R/2]
    interleaved (GPT-J)          a = x[2i],  b = x[2i + 1]

The first R elements of a head are rotated; the rest do not change. Source: RoFormer, arXiv 2104.09864.
"""

import torch
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import operator_for

OP = "transformer_inference"


def rotary_table(positions: Tensor, rotary_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at `positions`, each fp32 (*positions.shape, rotary_dim / 2).

    Called once per forward pass, for all layers.

    Args:
        positions: integers, (S,) or (B, S).
        rotary_dim: R, even.
        base: base of the geometric series of frequencies.

    Raises:
        ConfigError: `rotary_dim` is odd or below 2.

    >>> cos, sin = rotary_table(torch.arange(3), rotary_dim=4)
    >>> cos.shape, sin[0]
    (torch.Size([3, 2]), tensor([0., 0.]))
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"rotary_dim: found {rotary_dim}, but it must be even and at least 2")
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions.float().unsqueeze(-1) * base**-exponent
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, seq_dim: int = 1) -> Tensor:
    """Rotate the first R elements of each head of `x`; R is twice the last dimension of `cos`.

    Arithmetic is fp32, rounded once to x's dtype. Operator: `rotary(x, cos, sin, interleaved, seq_dim)`.

    Args:
        x: (B, S, heads, D) or, with `seq_dim=2`, (B, heads, S, D); fp32, bf16 or fp16.
        cos, sin: fp32 (S, R/2), or (B, S, R/2) if positions differ within the batch; R <= D.
        interleaved: which elements form a pair, see the module docstring.
        seq_dim: the dimension S of x, 1 or 2.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ConfigError: a shape or dtype does not fit; the message names the argument.

    >>> x = torch.ones(1, 3, 2, 8)
    >>> turned = apply_rotary(x, *rotary_table(torch.arange(3), rotary_dim=4))
    >>> torch.equal(turned[:, 0], x[:, 0]), torch.equal(turned[..., 4:], x[..., 4:])
    (True, True)
    """
    _check(x, cos, sin, seq_dim)
    if (kernel := operator_for(OP, "rotary", x, cos, sin)) is not None:
        return kernel(x, cos, sin, interleaved, seq_dim)
    return apply_rotary_reference(x, cos, sin, interleaved, seq_dim)


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    """The torch reference of `apply_rotary`."""
    half = cos.shape[-1]
    # the heads dimension is between positions and elements (seq_dim 1), or between batch and positions (seq_dim 2)
    heads_dim = -2 if seq_dim == 1 else -3
    if seq_dim == 1 or cos.dim() == 3:
        cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    wide = x[..., : 2 * half].float()
    pairs = wide.unflatten(-1, (half, 2) if interleaved else (2, half))
    dim = -1 if interleaved else -2
    a, b = pairs.unbind(dim)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def _check(x: Tensor, cos: Tensor, sin: Tensor, seq_dim: int) -> None:
    if x.dim() != 4 or not x.is_floating_point():
        raise ConfigError(f"x: found {x.dtype} of shape {tuple(x.shape)}, but it must be floating, with 4 dimensions")
    if seq_dim not in (1, 2):
        raise ConfigError(f"seq_dim: found {seq_dim}, but it must be 1 or 2")
    rows = (x.shape[seq_dim],) if cos.dim() == 2 else (x.shape[0], x.shape[seq_dim])
    for name, one in (("cos", cos), ("sin", sin)):
        fits = one.shape[:-1] == rows and one.shape == cos.shape and 2 * one.shape[-1] <= x.shape[-1]
        if one.dtype != torch.float32 or not fits:
            raise ConfigError(
                f"{name}: found {one.dtype} of shape {tuple(one.shape)}, but for x of shape {tuple(x.shape)} and "
                f"seq_dim {seq_dim} it must be float32 of shape {(*rows, 'R/2')} with R <= {x.shape[-1]}"
            )
