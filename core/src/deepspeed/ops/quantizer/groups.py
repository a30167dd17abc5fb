"""Quantize to int8 or int4 by group, and back. All kernels use the formulas and the layout of this file.

G groups of S consecutive elements (row-major order), b bits, all arithmetic in fp32:

    symmetric    scale = max(max|x| / (2^(b-1) - 1), tiny)       q = round(x / scale),              x ~ q scale
    asymmetric   scale = max((max - min) / (2^b - 1), tiny)      q = round((x - min) / scale) - 2^(b-1)
                 offset = min + 2^(b-1) scale                                                       x ~ q scale + offset

round: to nearest, ties to even; q is clamped to [-(2^(b-1) - 1), 2^(b-1) - 1], or [-2^(b-1), 2^(b-1) - 1] when
asymmetric. So |x - x'| <= scale / 2 up to fp32 rounding. `tiny` (the smallest normal fp32, 1.2e-38) makes a group of
zeros dequantize to zeros. If a group contains inf or nan, the whole group dequantizes to nan, so the error is visible.

Sources: B. Jacob et al., arXiv 1712.05877 (affine quantization); ZeRO++, arXiv 2306.10209 (blocks of gradients and
weights).

Layout
    q        int8, (G, ceil(S b / 8)). With b = 4, element 2i is the low nibble and 2i + 1 the high nibble of byte i,
             both in two's complement; for odd S the last high nibble is 0.
    params   fp32, (G, 1): scale; asymmetric (G, 2): scale, offset.

Fake quantization rounds a tensor to the quantized values but keeps its dtype. `deepspeed.compression` uses it for
quantization-aware training.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.errors import ConfigError, counted
from deepspeed.ops.operators import FLOATS, operator_for

OP = "quantizer"
PACKED_BITS = (4, 8)
TINY = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, num_groups: int, num_bits: int = 8, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Quantize `x` by group. Return (q, params) in the layout above. No gradient.

    Called before a tensor is sent or stored in quantized form.
    Operator: `quantize_groups(x, num_groups, num_bits, symmetric)`.

    Args:
        x: a floating-point tensor of any shape, read in row-major order.
        num_groups: G; must divide `x.numel()`.
        num_bits: 8 or 4.
        symmetric: True uses a range around 0; False uses the minimum to the maximum of a group.

    Returns:
        q: int8 (G, bytes per group), and params: fp32 (G, 1), or (G, 2) if asymmetric.

    Raises:
        ConfigError: `num_groups` or `num_bits` does not fit, or `x` is not a floating-point tensor.

    >>> q, params = quantize(torch.tensor([0.0, 1.0, -127.0, 3.0]), num_groups=1)
    >>> q, params
    (tensor([[   0,    1, -127,    3]], dtype=torch.int8), tensor([[1.]]))
    """
    check_groups(x, num_groups)
    _check_bits(num_bits)
    x = x.detach()
    if (kernel := operator_for(OP, "quantize_groups", x)) is not None:
        return kernel(x, num_groups, num_bits, symmetric)
    return quantize_reference(x, num_groups, num_bits, symmetric)


def dequantize(
    q: Tensor,
    params: Tensor,
    num_bits: int = 8,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Invert `quantize`. The shape of `params` shows whether the quantization is symmetric.

    Operator: `dequantize_groups(q, params, group_size, num_bits, dtype)`, (G, S).

    Args:
        q, params: (G, bytes) int8 and (G, 1 or 2) fp32.
        shape: shape of the result; default (G, S), where S is the capacity of the bytes. Required for int4 with odd S.
        dtype: fp32, bf16 or fp16; the fp32 result is rounded to nearest even.

    Raises:
        ConfigError: shapes or dtypes do not match; the message names the argument.

    >>> q, params = quantize(torch.tensor([[7.0, -3.0], [0.5, 3.5]]), num_groups=2, num_bits=4)
    >>> dequantize(q, params, num_bits=4, dtype=torch.bfloat16)
    tensor([[ 7.0000, -3.0000],
            [ 0.5000,  3.5000]], dtype=torch.bfloat16)
    """
    group_size = _check_quantized(q, params, num_bits, shape, dtype, copies=False)
    if (kernel := operator_for(OP, "dequantize_groups", params)) is not None:
        result = kernel(q, params, group_size, num_bits, dtype)
    else:
        result = dequantize_reference(q, params, group_size, num_bits, dtype)
    return result if shape is None else result.reshape(tuple(shape))


def dequantize_reduce(
    q: Tensor,
    params: Tensor,
    num_bits: int = 8,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    mean: bool = False,
) -> Tensor:
    """Return the sum (or mean) of C quantized tensors, as the receiver of a quantized reduction needs it.

    Tensors are added in order, in fp32, and rounded to `dtype` once. Used after an all-to-all of quantized gradients
    (ZeRO++, arXiv 2306.10209). Operator: `dequantize_reduce(q, params, group_size, num_bits, mean, dtype)`, (G, S).

    Args:
        q, params: (C, G, bytes) int8 and (C, G, 1 or 2) fp32.
        shape, dtype: shape and dtype of the result; see `dequantize`.
        mean: divide the sum by C.

    Raises:
        ConfigError: see `dequantize`.

    >>> q, params = quantize(torch.tensor([127.0, 1.0]), num_groups=1)
    >>> dequantize_reduce(torch.stack([q, q]), torch.stack([params, params]))
    tensor([[254.,   2.]])
    """
    group_size = _check_quantized(q, params, num_bits, shape, dtype, copies=True)
    if (kernel := operator_for(OP, "dequantize_reduce", params)) is not None:
        result = kernel(q, params, group_size, num_bits, mean, dtype)
    else:
        result = dequantize_reduce_reference(q, params, group_size, num_bits, mean, dtype)
    return result if shape is None else result.reshape(tuple(shape))


# ----- the torch reference -------------------------------------------------------------------------------------------


def quantize_reference(x: Tensor, num_groups: int, num_bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The torch reference of `quantize`. Tests compare kernels with it bit for bit."""
    levels, params = to_levels(x, num_groups, num_bits, symmetric)
    q = torch.nan_to_num(levels, nan=0.0).to(torch.int8)
    return (_pack(q) if num_bits == 4 else q), params


def dequantize_reference(q: Tensor, params: Tensor, group_size: int, num_bits: int, dtype: torch.dtype) -> Tensor:
    """The torch reference of `dequantize`, (..., G, S)."""
    return _to_numbers(q, params, group_size, num_bits).to(dtype)


def dequantize_reduce_reference(
    q: Tensor, params: Tensor, group_size: int, num_bits: int, mean: bool, dtype: torch.dtype
) -> Tensor:
    """The torch reference of `dequantize_reduce`, (G, S)."""
    total = torch.zeros((*params.shape[1:-1], group_size), dtype=torch.float32, device=q.device)
    for copy in range(q.shape[0]):
        total += _to_numbers(q[copy], params[copy], group_size, num_bits)
    return (total * (1 / q.shape[0]) if mean and q.shape[0] else total).to(dtype)


def to_levels(
    x: Tensor, num_groups: int, num_bits: int, symmetric: bool, stochastic: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the integers q of all elements as fp32 (G, S), and params. Also used for fake quantization."""
    groups = x.reshape(num_groups, x.numel() // num_groups).float()
    half = 2 ** (num_bits - 1)
    if groups.numel() == 0:
        low = high = groups.new_zeros(num_groups, 1)
    else:
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    if symmetric:
        scale = (torch.maximum(-low, high) * (1 / (half - 1))).clamp_min(TINY)
        return _round(groups * (1 / scale), stochastic).clamp(1 - half, half - 1), scale
    scale = ((high - low) * (1 / (2 * half - 1))).clamp_min(TINY)
    levels = _round((groups - low) * (1 / scale), stochastic).clamp(0, 2 * half - 1)
    return levels - half, torch.cat((scale, low + half * scale), 1)


def _round(levels: Tensor, stochastic: bool) -> Tensor:
    return torch.floor(levels + torch.rand_like(levels)) if stochastic else levels.round()


def from_levels(levels: Tensor, params: Tensor) -> Tensor:
    """Return levels * scale (+ offset) in fp32, for `params` (..., G, 1 or 2)."""
    numbers = levels * params[..., :1]
    return numbers if params.shape[-1] == 1 else numbers + params[..., 1:]


def _to_numbers(q: Tensor, params: Tensor, group_size: int, num_bits: int) -> Tensor:
    levels = (_unpack(q) if num_bits == 4 else q)[..., :group_size]
    return from_levels(levels.float(), params)


def _pack(q: Tensor) -> Tensor:
    pairs = torch.nn.functional.pad(q, (0, q.shape[-1] % 2)).view(torch.uint8)
    return ((pairs[..., 0::2] & 15) | (pairs[..., 1::2] << 4)).view(torch.int8)


def _unpack(q: Tensor) -> Tensor:
    low, high = (q << 4) >> 4, q >> 4  # arithmetic shifts keep the sign
    return torch.stack((low, high), -1).flatten(-2)


# ----- checks --------------------------------------------------------------------------------------------------------


def check_groups(x: Tensor, num_groups: int) -> None:
    """Raise a ConfigError unless `x` is floating-point and divides into `num_groups` equal groups."""
    if not x.is_floating_point():
        raise ConfigError(f"x: found dtype {x.dtype}, but only floating tensors can be quantized")
    if num_groups < 1 or x.numel() % num_groups:
        raise ConfigError(
            f"num_groups: found {num_groups}, but it must divide the {counted(x.numel(), 'element')} of x, "
            f"of shape {tuple(x.shape)}, into equal groups"
        )


def _check_bits(num_bits: int) -> None:
    if num_bits not in PACKED_BITS:
        raise ConfigError(f"num_bits: found {num_bits}, but it must be 8 or 4")


def _check_quantized(
    q: Tensor, params: Tensor, num_bits: int, shape: Sequence[int] | None, dtype: torch.dtype, copies: bool
) -> int:
    """Check all arguments, and return the group size S."""
    _check_bits(num_bits)
    rank, layout = (3, "(C, G, bytes)") if copies else (2, "(G, bytes)")
    if q.dtype != torch.int8 or q.dim() != rank:
        raise ConfigError(f"q: found {q.dtype} of shape {tuple(q.shape)}, but it must be int8 of shape {layout}")
    if params.dtype != torch.float32 or params.shape[:-1] != q.shape[:-1] or params.shape[-1] not in (1, 2):
        raise ConfigError(
            f"params: found {params.dtype} of shape {tuple(params.shape)}, but for q of shape {tuple(q.shape)} it must "
            f"be float32 of shape {(*q.shape[:-1], 1)}, or 2 at the end when asymmetric"
        )
    if dtype not in FLOATS:
        raise ConfigError(f"dtype: found {dtype}, but it must be float32, bfloat16 or float16")
    num_groups, num_bytes = q.shape[-2:]
    if shape is None:
        return num_bytes * 8 // num_bits
    numel = math.prod(shape)
    group_size = numel // max(num_groups, 1)
    if group_size * num_groups != numel or (group_size * num_bits + 7) // 8 != num_bytes:
        raise ConfigError(
            f"shape: found {tuple(shape)}, {counted(numel, 'element')}, but q holds {counted(num_groups, 'group')} of "
            f"{counted(num_bytes, 'byte')} of {num_bits}-bit integers"
        )
    return group_size


_MIN_BITS, _MAX_BITS = 2, 16


def ds_quantizer(input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False) -> Tensor:
    """Call `fake_quantize` under DeepSpeed's name and arguments.

    The result is a new tensor; `input` does not change.

    Args:
        input: a floating-point tensor of any shape.
        groups: number of groups, each with its own scale; must divide `input.numel()`.
        bit_num: 2 to 16.
        sr: round stochastically instead of to nearest.
        asym: use the minimum to the maximum of a group instead of a range around 0.

    Raises:
        ConfigError: see `fake_quantize`.
    """
    return fake_quantize(input, groups, bit_num, symmetric=not asym, stochastic=sr)


def fake_quantize(
    x: Tensor, num_groups: int = 1, num_bits: int = 8, *, symmetric: bool = True, stochastic: bool = False
) -> Tensor:
    """Compute `dequantize(quantize(x))` in one step. The result has x's shape and dtype, and no gradient.

    Operator: `fake_quantize_groups(x, num_groups, num_bits, symmetric)`; stochastic rounding always runs in torch.

    Args:
        x: a floating-point tensor of any shape; it does not change.
        num_groups: must divide `x.numel()`.
        num_bits: 2 to 16.
        symmetric: True uses a range around 0; False uses the minimum to the maximum of a group.
        stochastic: round x / scale up with the probability of its fraction (torch's generator of x's device): unbiased,
            |x - x'| < scale.

    Raises:
        ConfigError: an argument does not fit; the message names it.

    >>> import torch
    >>> fake_quantize(torch.tensor([3.0, 1.4, -2.6]), num_bits=3)
    tensor([ 3.,  1., -3.])
    """
    check_groups(x, num_groups)
    if not _MIN_BITS <= num_bits <= _MAX_BITS:
        raise ConfigError(f"num_bits: found {num_bits}, but it must be {_MIN_BITS} to {_MAX_BITS}")
    x = x.detach()
    if not stochastic and (kernel := operator_for(OP, "fake_quantize_groups", x)) is not None:
        return kernel(x, num_groups, num_bits, symmetric)
    return fake_quantize_reference(x, num_groups, num_bits, symmetric, stochastic)


def fake_quantize_reference(
    x: Tensor, num_groups: int, num_bits: int, symmetric: bool, stochastic: bool = False
) -> Tensor:
    """The torch reference of `fake_quantize`. Tests compare kernels with it."""
    levels, params = to_levels(x, num_groups, num_bits, symmetric, stochastic)
    return from_levels(levels, params).to(x.dtype).reshape(x.shape)
