"""Weights of linear layers in int8, int4, fp8 or fp6, and the product with them: 1/2 to 1 byte per weight, and scales.

A weight (out, in) is divided along `in` into groups of `group_size` elements. `groups.py` quantizes each group:

    w[o, i] ~ q[o, i] scales[o, i // group_size] + zeros[o, i // group_size]         zeros are 0 if symmetric

    data      int8 (out, in), or (out, in / 2) with 4 bits: element 2i is the low nibble of byte i and 2i + 1 the high
              one, both in two's complement
    scales    fp32 (out, in / group_size)
    zeros     fp32 of the same shape; None if symmetric

Floating-point weights are e4m3 with 8 bits and e3m2 with 6 (see `floats.py`), in int8 data of shape (out, in) or
(out, 3 in / 4), and symmetric. They save memory, but no kernel reads them, so each product dequantizes the weight.

To shard a weight across ranks, slice the three tensors: along `out`, or along `in` between groups.
Sources: B. Jacob et al., arXiv 1712.05877; groups along `in`: E. Frantar et al., arXiv 2210.17323.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import ConfigError, counted
from deepspeed.ops.operators import FLOATS, operator_for
from deepspeed.ops.quantizer.floats import E3M2, E4M3, FloatFormat, dequantize_floats, quantize_floats
from deepspeed.ops.quantizer.groups import PACKED_BITS, dequantize, quantize

OP = "inference_core_ops"
# Maximum rows of x for which a kernel reads the packed weight. For more rows, the weight is dequantized once, and torch
# computes the product, which is then compute-bound.
MOST_ROWS = 16
# number of elements (in full rows) to pack at once, so that temporary tensors take a few MiB
_NUMEL_AT_ONCE = 2**18
# bits -> format of a floating-point weight
FLOATING: dict[int, FloatFormat] = {8: E4M3, 6: E3M2}


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight (out, in) from `pack_weight` for `packed_linear`. Layout: see the module docstring.

    Fields:
        data: int8 (out, in * bits / 8).
        scales: fp32 (out, in / group_size).
        zeros: fp32 with the shape of scales, or None if symmetric.
        bits: 8 or 4; 8 or 6 if `floating`.
        group_size: number of consecutive elements of a row that share a scale.
        shape: (out, in).
        floating: numbers are e4m3 or e3m2, not integers.
        input_bits: 16 or 8, the precision to which a kernel may round the input x. With 8, the error of each element is
            at most 1/254 of the largest element in the same group of the weight.

    Raises:
        ConfigError: the dtype or shape of a tensor does not match the other fields.
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    shape: tuple[int, int]
    floating: bool = False
    input_bits: int = 16

    def __post_init__(self) -> None:
        check_bits(self.bits, self.floating)
        if self.input_bits not in (16, 8):
            raise ConfigError(f"input_bits: found {self.input_bits}, but it must be 16 or 8")
        rows, cols = self.shape
        _check_group(self.group_size, cols, self.bits, self.floating)
        of_groups = (rows, cols // self.group_size if cols else 0)
        wanted = {"data": (self.data, torch.int8, (rows, cols * self.bits // 8))}
        wanted["scales"] = (self.scales, torch.float32, of_groups)
        if self.zeros is not None:
            wanted["zeros"] = (self.zeros, torch.float32, of_groups)
        for name, (tensor, dtype, shape) in wanted.items():
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ConfigError(
                    f"{name}: found {tensor.dtype} of shape {tuple(tensor.shape)}, but for a weight of shape "
                    f"{self.shape} with {self.bits} bits and groups of {self.group_size} it must be {dtype} of shape "
                    f"{shape}"
                )

    def arguments(self, bias: Tensor | None) -> tuple[Any, ...]:
        """Return the operator's arguments after x."""
        given = (self.data, self.scales, self.zeros, bias, self.bits)
        return given if self.input_bits == 16 else (*given, self.input_bits)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of data, scales and zeros."""
        tensors = (self.data, self.scales) if self.zeros is None else (self.data, self.scales, self.zeros)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def form(self) -> str:
        """A description of the packing for messages: `8 bits, groups of 128`."""
        return f"{self.bits} bits{' with an exponent' if self.floating else ''}, groups of {self.group_size}"

    def to(self, device: torch.device | str) -> "PackedWeight":
        """Return the weight on `device`."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, data=self.data.to(device), scales=self.scales.to(device), zeros=zeros)

    def narrow(self, dim: int, start: int, length: int) -> "PackedWeight":
        """Return rows (dim 0) or columns (dim 1) [start, start + length) as a new contiguous packed weight.

        Columns can only be split between groups. If a group is a full row, it can be split at any column that fills
        whole bytes, and both parts keep the scale.

        Raises:
            ConfigError: the range is out of bounds, or splits a group; the message has the sizes that fit.
        """
        size = self.shape[dim]
        if start < 0 or length < 1 or start + length > size:
            raise ConfigError(f"dim {dim}: found [{start}, {start + length}), but the weight has {size} there")
        rows, cols = self.shape
        if dim == 0:
            data, scales = (one[start : start + length].contiguous() for one in (self.data, self.scales))
            zeros = None if self.zeros is None else self.zeros[start : start + length].contiguous()
            return replace(self, data=data, scales=scales, zeros=zeros, shape=(length, cols))
        whole_row = self.group_size == cols
        step = unit_of(self.bits, self.floating) if whole_row else self.group_size
        if start % step or length % step:
            raise ConfigError(
                f"dim 1: found [{start}, {start + length}), but the weight has groups of "
                f"{counted(self.group_size, 'element')}: begin and length must be multiples of {step}"
            )
        first, count = (0, 1) if whole_row else (start // step, length // step)
        data = self.data[:, start * self.bits // 8 : (start + length) * self.bits // 8].contiguous()
        scales = self.scales[:, first : first + count].contiguous()
        zeros = None if self.zeros is None else self.zeros[:, first : first + count].contiguous()
        group_size = length if whole_row else self.group_size
        shape = (rows, length)
        return replace(self, data=data, scales=scales, zeros=zeros, group_size=group_size, shape=shape)


def pack_weight(
    weight: Tensor, bits: int = 8, group_size: int = 0, symmetric: bool = True, *, floating: bool = False
) -> PackedWeight:
    """Quantize `weight`. Called once per layer, after its weight is loaded. No gradient.

    Args:
        weight: a floating-point tensor (out, in), as in `torch.nn.Linear`.
        bits: 8 or 4; 8 or 6 if `floating`.
        group_size: number of elements of a row that share a scale, a divisor of `in` that fills whole bytes; 0 means a
            full row.
        symmetric: False uses the minimum to the maximum of each group, which costs 4 more bytes per group.
        floating: numbers are e4m3 or e3m2, and symmetric.

    Raises:
        ConfigError: an argument does not fit; the message has the group sizes that fit.

    >>> packed = pack_weight(torch.tensor([[127.0, -3.0], [0.5, 63.5]]))
    >>> packed.data.tolist(), packed.scales.tolist(), packed.zeros
    ([[127, -3], [1, 127]], [[1.0], [0.5]], None)
    """
    if weight.dim() != 2:
        raise ConfigError(f"weight: found shape {tuple(weight.shape)}, but it must be (out, in)")
    shape = (weight.shape[0], weight.shape[1])
    return pack_rows([weight], shape, bits, group_size, symmetric, floating=floating)


def pack_rows(
    parts: Iterable[Tensor],
    shape: tuple[int, int],
    bits: int = 8,
    group_size: int = 0,
    symmetric: bool = True,
    *,
    floating: bool = False,
) -> PackedWeight:
    """Pack a weight that is given in parts, so that only one part at a time is in memory. See `pack_weight`.

    Args:
        parts: tensors (some rows, in) that together hold all rows in order.
        shape: (out, in) of the weight.
    """
    check_bits(bits, floating)
    if floating and not symmetric:
        raise ConfigError("symmetric: found False, but floating weights have no minimum; leave it out")
    rows, cols = shape
    size = group_size or cols
    _check_group(size, cols, bits, floating)
    if not rows * cols:
        raise ConfigError(f"weight: found shape {(rows, cols)}, but a weight without elements cannot be packed")
    whole: PackedWeight | None = None
    start = 0
    for part in parts:
        for some in part.split(max(1, _NUMEL_AT_ONCE // cols)):
            if whole is None:
                data = some.new_empty((rows, cols * bits // 8), dtype=torch.int8)
                scales = some.new_empty((rows, cols // size), dtype=torch.float32)
                zeros = None if symmetric else torch.empty_like(scales)
                whole = PackedWeight(data, scales, zeros, bits, size, (rows, cols), floating)
            _pack_into(whole, start, some)
            start += len(some)
    assert whole is not None
    assert start == rows
    return whole


def _pack_into(whole: PackedWeight, start: int, some: Tensor) -> None:
    """Quantize `some` rows into `whole`, from row `start` on."""
    stop, num_groups = start + len(some), some.numel() // whole.group_size
    if whole.floating:
        data, params = quantize_floats(some, num_groups, FLOATING[whole.bits])
        data = data.view(torch.int8)
    else:
        data, params = quantize(some, num_groups, whole.bits, whole.zeros is None)
    whole.data[start:stop].copy_(data.view(len(some), -1))
    whole.scales[start:stop].copy_(params[:, 0].view(len(some), -1))
    if whole.zeros is not None:
        whole.zeros[start:stop].copy_(params[:, 1].view(len(some), -1))


def stack_packed(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Concatenate packed weights along the rows. They must have the same number of columns and the same packing."""
    data, scales = torch.cat([each.data for each in parts]), torch.cat([each.scales for each in parts])
    zeros = [each.zeros for each in parts if each.zeros is not None]
    shape = (data.shape[0], parts[0].shape[1])
    return replace(parts[0], data=data, scales=scales, zeros=torch.cat(zeros) if zeros else None, shape=shape)


def unpack_weight(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a weight (out, in) in fp32, rounded to `dtype`.

    |w - w'| <= scale / 2 with the scale of the group, up to the rounding of fp32 and of `dtype`. The scale is
    max|w| / (2^(bits-1) - 1) of the group, or (max - min) / (2^bits - 1) if asymmetric. For floating-point weights,
    |w - w'| is at most 2^-4 |w| with 8 bits and 2^-3 |w| with 6, or 2^-10 and 2^-5 of the scale if larger.

    >>> weight = torch.tensor([[7.0, -7.0, 0.4, 1.0]])
    >>> unpack_weight(pack_weight(weight, bits=4))
    tensor([[ 7., -7.,  0.,  1.]])
    """
    rows, cols = packed.shape
    params = packed.scales.reshape(-1, 1)
    if packed.floating:
        q = packed.data.reshape(params.shape[0], -1).view(torch.uint8)
        return dequantize_floats(q, params, FLOATING[packed.bits], dtype).view(rows, cols)
    if packed.zeros is not None:
        params = torch.cat((params, packed.zeros.reshape(-1, 1)), 1)
    q = packed.data.reshape(params.shape[0], packed.group_size * packed.bits // 8)
    return dequantize(q, params, packed.bits, shape=(rows, cols), dtype=dtype)


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute x w^T + bias for a packed weight, like `torch.nn.functional.linear` with `unpack_weight(packed)`.

    Up to `MOST_ROWS` rows of x, a kernel reads the packed bytes. Its arithmetic is fp32, rounded once to x's dtype. For
    bf16 inputs, it may use integers with an error of at most 2^-16 of the largest |x| that shares a scale, which is
    less than the rounding to bf16. With `input_bits` 8 the integers have 8 bits, even for fp32 inputs. If x has more
    rows or requires a gradient, torch computes the product with the weight dequantized to x's dtype. x gets a gradient,
    the weight does not. Operator:
    `packed_linear(x, data, scales, zeros, bias, bits, input_bits=16)`; `input_bits` is passed only if it is 8.

    Args:
        x: (..., in) in fp32, bf16 or fp16.
        bias: (out,) in x's dtype or fp32.

    Returns:
        (..., out) in x's dtype.

    Raises:
        ConfigError: x or bias does not fit the weight; the message names it.

    >>> packed_linear(torch.tensor([1.0, 2.0]), pack_weight(torch.tensor([[127.0, 1.0], [-127.0, 0.0]])))
    tensor([ 129., -127.])
    """
    rows, cols = packed.shape
    if x.dim() == 0 or x.shape[-1] != cols or x.dtype not in FLOATS:
        raise ConfigError(
            f"x: found {x.dtype} of shape {tuple(x.shape)}, but for a packed weight of shape {packed.shape} it must be "
            f"float32, bfloat16 or float16 with {cols} at the end"
        )
    if bias is not None and bias.shape != (rows,):
        raise ConfigError(f"bias: found shape {tuple(bias.shape)}, but it must be ({rows},)")
    if (kernel := packed_kernel(x, packed, bias)) is not None:
        return kernel(x, *packed.arguments(bias))
    return packed_linear_reference(x, packed, bias)


def packed_grouped_linear(x: Tensor, packed: PackedWeight, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """Apply `packed_linear` to groups of rows: the first `counts[0]` rows of x use the first weight, and so on.

    Weights without rows are not read. If no weight has more than `MOST_ROWS` rows, one kernel call reads the packed
    bytes of all weights with rows; else each weight takes its own `packed_linear`. A vendor may omit the operator
    `packed_grouped_linear(x, data, scales, zeros, bias, counts, bits, input_bits=16)`, with bias (weights * out,).

    Args:
        x: (rows, in) with sum(counts) rows.
        packed: (weights * out, in), the weights concatenated along the rows.
        counts: number of rows of x per weight.
        bias: (weights, out) in x's dtype or fp32.

    Returns:
        (rows, out) in x's dtype.

    Raises:
        ConfigError: x, counts or bias does not fit the weights; the message names it.

    >>> packed = pack_weight(torch.tensor([[127.0, 1.0], [-127.0, 0.0]]))
    >>> packed_grouped_linear(torch.tensor([[1.0, 2.0], [1.0, 0.0]]), packed, [0, 2])
    tensor([[-127.],
            [-127.]])
    """
    rows = packed.shape[0]
    if not counts or rows % len(counts) or x.dim() != 2 or x.shape[0] != sum(counts):
        raise ConfigError(
            f"counts: found {list(counts)} for x of shape {tuple(x.shape)} and packed weights of {packed.shape}; give "
            "the rows of x for each weight, whose number divides the rows of the packed ones"
        )
    out = rows // len(counts)
    if bias is not None and bias.shape != (len(counts), out):
        raise ConfigError(f"bias: found shape {tuple(bias.shape)}, but it must be ({len(counts)}, {out})")
    if not packed.floating and max(counts) <= MOST_ROWS:
        kernel = operator_for(OP, "packed_grouped_linear", x, packed.scales, packed.zeros, bias)
        if kernel is not None:
            given = (packed.data, packed.scales, packed.zeros, None if bias is None else bias.flatten())
            return kernel(x, *given, counts, packed.bits, packed.input_bits)
    y = x.new_empty(x.shape[0], out)
    start = 0
    for number, count in enumerate(counts):
        if count:
            one = packed.narrow(0, number * out, out)
            stop = start + count
            y[start:stop] = packed_linear(x[start:stop], one, None if bias is None else bias[number])
            start = stop
    return y


def packed_kernel(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Return the operator that `packed_linear` calls for these tensors, or None."""
    if packed.floating or x.numel() > MOST_ROWS * packed.shape[1]:
        return None
    return operator_for(OP, "packed_linear", x, packed.scales, packed.zeros, bias)


def packed_linear_reference(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The torch reference of `packed_linear`, with the weight rounded to x's dtype."""
    return F.linear(x, unpack_weight(packed, x.dtype), None if bias is None else bias.to(x.dtype))


def unit_of(bits: int, floating: bool) -> int:
    """Return the number of elements that together fill whole bytes."""
    return FLOATING[bits].unit if floating else 8 // bits


def check_bits(bits: int, floating: bool) -> None:
    """Raise a ConfigError unless weights can have this number of bits."""
    if bits not in (FLOATING if floating else PACKED_BITS):
        raise ConfigError(f"bits: found {bits}, but it must be {'8 or 6 where floating' if floating else '8 or 4'}")


def _check_group(group_size: int, cols: int, bits: int, floating: bool) -> None:
    step = unit_of(bits, floating)
    if group_size >= 1 and cols % group_size == 0 and group_size % step == 0:
        return
    fits = [size for size in (32, 64, 128, 256, cols) if size and cols % size == 0 and size % step == 0]
    advice = f"for example {', '.join(map(str, sorted(set(fits))))}" if fits else "which has none: leave it unquantized"
    filled = {2: ", even, because a byte holds two", 4: ", a multiple of 4, because three bytes hold four"}.get(
        step, ""
    )
    raise ConfigError(
        f"group_size: found {group_size}, but with {bits} bits it must divide the {cols} columns of the weight{filled};"
        f" {advice}"
    )
