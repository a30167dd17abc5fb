"""Norms, gelu and rotary embedding by the vendor's operators; formulas in `deepspeed.ops.transformer`.

The vendor wants all tensors of a call in one dtype, and 2 to 8 dimensions. Where core's front gives fp32 weights to a
half input, or asks for a sum in fp32, the call is made in fp32 and its result rounded once, as core's references do.
`npu_fast_gelu` is another function (x sigmoid(1.702 x), off by up to 0.02) and serves neither form of gelu.

Shape legend: B batch, S positions, H heads, D elements of a head, R of them turn, N the last dimension.
"""

import torch
from deepspeed.ops.transformer.rotary import apply_rotary_reference
from torch import Tensor

# What the vendor's page of npu_rotary_mul allows.
_MAX_ELEMENTS = 896
_MAX_HEADS = 1000


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By `npu_layer_norm_eval`."""
    import torch_npu

    wide, (gamma, beta) = _of_one_dtype(x, weight, bias)
    normed: Tensor = torch_npu.npu_layer_norm_eval(_rows(wide), [x.shape[-1]], gamma, beta, eps)
    return normed.view(x.shape).to(x.dtype)


def layer_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum by torch, its norm by `npu_layer_norm_eval`: no page of the vendor's describes one for both."""
    total = _sum(x, residual)
    return layer_norm(total, weight, bias, eps), total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """By `npu_rms_norm`."""
    import torch_npu

    wide, (gamma, _) = _of_one_dtype(x, _or_ones(weight, x), None)
    normed, _rstd = torch_npu.npu_rms_norm(_rows(wide), gamma, eps)
    return normed.view(x.shape).to(x.dtype)


def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """By `npu_add_rms_norm`; with an fp32 weight beside a half input the sum is torch's, so that it is rounded."""
    import torch_npu

    if weight is not None and weight.dtype != x.dtype:
        total = _sum(x, residual)
        return rms_norm(total, weight, eps), total
    normed, _rstd, total = torch_npu.npu_add_rms_norm(_rows(x), _rows(residual), _or_ones(weight, x), eps)
    return normed.view(x.shape), total.view(x.shape)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """By `npu_gelu`; torch's own gelu computes the tanh form on this device whatever it is asked for."""
    import torch_npu

    return torch_npu.npu_gelu(_rows(x), approximate="tanh" if tanh else "none").view(x.shape)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """The sum in fp32, then `gelu`."""
    return gelu(_sum(x.float(), bias.float()), tanh).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    """By `npu_rotary_mul` in fp32, as the table is; by core's reference for shapes that the vendor excludes.

    The vendor's formula is x r1 + rotate(x) r2, with tables over all R elements: R / 2 numbers twice over for halves,
    each twice for neighbours.
    """
    import torch_npu

    num_turned = 2 * cos.shape[-1]
    if not _vendor_takes(x, cos, num_turned, interleaved, seq_dim):
        return apply_rotary_reference(x, cos, sin, interleaved, seq_dim)
    tables = []
    for half in (cos, sin):
        whole = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        whole = whole if whole.dim() == 3 else whole.unsqueeze(0)  # (1 or B, S, R)
        tables.append(whole.unsqueeze(2 if seq_dim == 1 else 1).contiguous())
    turning = x[..., :num_turned].float().contiguous()
    turned = torch_npu.npu_rotary_mul(turning, *tables, rotary_mode="interleave" if interleaved else "half").to(x.dtype)
    return turned if num_turned == x.shape[-1] else torch.cat((turned, x[..., num_turned:]), -1)


def _vendor_takes(x: Tensor, cos: Tensor, num_turned: int, interleaved: bool, seq_dim: int) -> bool:
    batch, heads = x.shape[0], x.shape[2 if seq_dim == 1 else 1]
    if num_turned >= _MAX_ELEMENTS:
        return False
    if interleaved:
        return cos.dim() == 2 and batch * heads < _MAX_HEADS
    return batch < _MAX_HEADS and heads < _MAX_HEADS


def _of_one_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """Contiguous `x` and its weights in one dtype: x's, or fp32 where one of them is fp32."""
    given = [one.dtype for one in (weight, bias) if one is not None]
    dtype = x.dtype if all(one == x.dtype for one in given) else torch.float32
    return x.to(dtype).contiguous(), [None if one is None else one.to(dtype) for one in (weight, bias)]


def _or_ones(weight: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight


def _sum(x: Tensor, other: Tensor) -> Tensor:
    return (x + other).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1] if x.dim() else 1)
