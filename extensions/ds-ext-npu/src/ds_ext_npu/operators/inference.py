"""Norms, gelu and rotary embedding with the vendor's operators. Formulas: `deepspeed.ops.transformer`.

The vendor's operators need all tensors in one dtype, with 2 to 8 dimensions. If core passes fp32 weights with a
half-precision input, or needs a sum in fp32, the call runs in fp32 and its result is rounded once, as in core's
references. `npu_fast_gelu` computes another function (x sigmoid(1.702 x), off by up to 0.02), so it is not used.

Shape legend: B batch, S positions, H heads, D head size, R rotated elements of a head, N the last dimension.
"""

import torch
from deepspeed.ops.transformer.rotary import apply_rotary_reference
from torch import Tensor

# The limits in the vendor's documentation of npu_rotary_mul.
_MAX_ELEMENTS = 896
_MAX_HEADS = 1000


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Call `npu_layer_norm_eval`."""
    import torch_npu

    wide, (gamma, beta) = _of_one_dtype(x, weight, bias)
    normed: Tensor = torch_npu.npu_layer_norm_eval(_rows(wide), [x.shape[-1]], gamma, beta, eps)
    return normed.view(x.shape).to(x.dtype)


def layer_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add in torch, then call `npu_layer_norm_eval`: the vendor documents no fused operator."""
    total = _sum(x, residual)
    return layer_norm(total, weight, bias, eps), total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Call `npu_rms_norm`."""
    import torch_npu

    wide, (gamma, _) = _of_one_dtype(x, _or_ones(weight, x), None)
    normed, _rstd = torch_npu.npu_rms_norm(_rows(wide), gamma, eps)
    return normed.view(x.shape).to(x.dtype)


def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Call `npu_add_rms_norm`. If the weight has another dtype than x, add in torch, so that the sum is rounded."""
    import torch_npu

    if weight is not None and weight.dtype != x.dtype:
        total = _sum(x, residual)
        return rms_norm(total, weight, eps), total
    normed, _rstd, total = torch_npu.npu_add_rms_norm(_rows(x), _rows(residual), _or_ones(weight, x), eps)
    return normed.view(x.shape), total.view(x.shape)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Call `npu_gelu`: on this device, torch's own gelu always computes the tanh form."""
    import torch_npu

    return torch_npu.npu_gelu(_rows(x), approximate="tanh" if tanh else "none").view(x.shape)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """Add in fp32, then call `gelu`."""
    return gelu(_sum(x.float(), bias.float()), tanh).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    """Call `npu_rotary_mul` in fp32, the dtype of the table, or core's reference for shapes that the vendor excludes.

    The vendor computes x r1 + rotate(x) r2, with tables over all R elements. For halves, the R / 2 numbers are repeated
    as a whole; for interleaved pairs, each number is repeated.
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
    """Return contiguous `x` and its weights in one dtype: x's dtype if all have it, else fp32."""
    given = [one.dtype for one in (weight, bias) if one is not None]
    dtype = x.dtype if all(one == x.dtype for one in given) else torch.float32
    return x.to(dtype).contiguous(), [None if one is None else one.to(dtype) for one in (weight, bias)]


def _or_ones(weight: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight


def _sum(x: Tensor, other: Tensor) -> Tensor:
    return (x + other).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1] if x.dim() else 1)
