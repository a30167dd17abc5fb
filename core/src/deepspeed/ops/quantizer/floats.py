"""Quantize to floating-point numbers of 12, 8 or 6 bits by group, and back. Defines the formats and the byte layout.

G groups of S consecutive elements (row-major order), arithmetic in fp32:

    scale = max(max|x| / largest, tiny)       q = the number of the format nearest to x / scale       x ~ q scale

A format has a sign, e exponent bits and m mantissa bits, subnormal numbers and (except e5m2) no infinities:

    bits   format   largest          |q - x / scale| at most
    8      e4m3     448              2^-4 |x / scale|, 2^-10 below 2^-6       torch.float8_e4m3fn
    8      e5m2     57344            2^-3 |x / scale|, 2^-17 below 2^-14      torch.float8_e5m2
    6      e3m2     28               2^-3 |x / scale|, 2^-5  below 2^-2
    12     e7m4     496              2^-5 |x / scale|, 2^-67 below 2^-62

The error is half of the distance between neighbors, with ties to even; with stochastic rounding it is the full
distance. The largest number of e7m4 is 31 x 2^59, but groups are scaled to 496, so that the scale is a normal number
whenever x is. `tiny` and groups with inf or nan are handled as in `groups.py`, which quantizes to integers.

Sources of the formats: P. Micikevicius et al., arXiv 2209.05433 (8 bits); OCP Microscaling Formats 1.0 (e3m2).

Layout
    codes    sign, exponent and mantissa from the highest bit, as in torch's float8
    data     uint8, (G, S b / 8): codes from the lowest bit of the first byte; 3 bytes hold 4 codes of 6 bits or 2 of 12
    scales   fp32, (G, 1)
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer.groups import TINY, check_groups


@dataclass(frozen=True)
class FloatFormat:
    """A number format; see the module docstring.

    Fields:
        exponent_bits, mantissa_bits: numbers of bits, without the sign.
        largest: the value to which the largest number of a group is scaled.
        dtype: torch's dtype with these codes, or None.
    """

    exponent_bits: int
    mantissa_bits: int
    largest: float
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def name(self) -> str:
        """The name with the numbers of exponent and mantissa bits: `e4m3`."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}"

    @property
    def bias(self) -> int:
        """The bias that a code adds to the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def unit(self) -> int:
        """The number of elements that together fill whole bytes."""
        return 8 // math.gcd(self.bits, 8)


E4M3 = FloatFormat(4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = FloatFormat(5, 2, 57344.0, torch.float8_e5m2)
E3M2 = FloatFormat(3, 2, 28.0)
E7M4 = FloatFormat(7, 4, 496.0)


def quantize_floats(x: Tensor, num_groups: int, form: FloatFormat, stochastic: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize `x` by group. Return (data, scales) in the layout above. No gradient.

    Args:
        x: a floating-point tensor of any shape, read in row-major order.
        num_groups: G; must divide `x.numel()` into groups that fill whole bytes.
        stochastic: round up with the probability of the fraction (torch's generator of x's device): unbiased.

    Raises:
        ConfigError: `num_groups` does not fit, or `x` is not a floating-point tensor.

    >>> data, scales = quantize_floats(torch.tensor([448.0, -1.1, 0.0, 17.0]), 1, E4M3)
    >>> dequantize_floats(data, scales, E4M3)
    tensor([[448.0000,  -1.1250,   0.0000,  16.0000]])
    """
    check_groups(x, num_groups)
    size = x.numel() // num_groups
    if size % form.unit:
        raise ConfigError(
            f"num_groups: found {num_groups}, groups of {size} elements, but with {form.bits} bits {form.unit} elements"
            " fill whole bytes; give a size that is a multiple"
        )
    groups = x.detach().reshape(num_groups, size).float()
    greatest = groups.abs().amax(1, keepdim=True) if size else groups.new_zeros(num_groups, 1)
    scales = (greatest * (1 / form.largest)).clamp_min(TINY)
    numbers = torch.nan_to_num(groups / scales, nan=0.0).clamp(-form.largest, form.largest)
    if form.dtype is not None and not stochastic:
        return numbers.to(form.dtype).view(torch.uint8), scales
    return _pack(_codes(numbers, form, stochastic), form), scales


def dequantize_floats(data: Tensor, scales: Tensor, form: FloatFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Invert `quantize_floats`: return (..., G, S), computed in fp32 and rounded to `dtype`."""
    if form.dtype is not None:
        return (data.view(form.dtype).float() * scales).to(dtype)
    table = _table(form, data.device)
    return (table[_unpack(data, form)] * scales).to(dtype)


def _codes(numbers: Tensor, form: FloatFormat, stochastic: bool) -> Tensor:
    """Return the codes as int32. With n = round(|x| / 2^(e - m)) a code is (e + bias - 1) 2^m + n. This also holds for
    subnormal numbers, with e = 1 - bias, and if n rounds up to the next exponent."""
    sizes = numbers.abs()
    exponents = (torch.frexp(sizes).exponent - 1).masked_fill(sizes == 0, 1 - form.bias).clamp_min(1 - form.bias)
    steps = torch.ldexp(sizes, form.mantissa_bits - exponents)
    rounded = torch.floor(steps + torch.rand_like(steps)) if stochastic else steps.round()
    codes = (exponents + form.bias - 1) * 2**form.mantissa_bits + rounded.int()
    mantissa, exponent = math.frexp(form.largest)
    greatest = (exponent + form.bias - 2 + 2 * mantissa) * 2**form.mantissa_bits
    return codes.clamp_max(int(greatest)) + 2 ** (form.bits - 1) * torch.signbit(numbers).int()


@functools.cache
def _table(form: FloatFormat, device: torch.device) -> Tensor:
    """Return a fp32 table: code -> number."""
    codes = torch.arange(2 ** (form.bits - 1))
    exponents, mantissas = codes >> form.mantissa_bits, codes & (2**form.mantissa_bits - 1)
    whole = mantissas + (exponents > 0) * 2**form.mantissa_bits
    sizes = torch.ldexp(whole.double(), exponents.clamp_min(1) - form.bias - form.mantissa_bits).float()
    return torch.cat((sizes, -sizes)).to(device)


def _pack(codes: Tensor, form: FloatFormat) -> Tensor:
    """Pack codes (..., S) into uint8 (..., S b / 8), one word of up to 24 bits per unit."""
    units = codes.unflatten(-1, (-1, form.unit))
    places = torch.arange(form.unit, device=codes.device) * form.bits
    words = (units << places).sum(-1)
    bytes_of_word = torch.arange(form.unit * form.bits // 8, device=codes.device) * 8
    return ((words.unsqueeze(-1) >> bytes_of_word) & 255).to(torch.uint8).flatten(-2)


def _unpack(data: Tensor, form: FloatFormat) -> Tensor:
    """Invert `_pack`: return int32 codes."""
    parts = data.unflatten(-1, (-1, form.unit * form.bits // 8)).int()
    words = (parts << (torch.arange(parts.shape[-1], device=data.device, dtype=torch.int32) * 8)).sum(-1).int()
    places = torch.arange(form.unit, device=data.device, dtype=torch.int32) * form.bits
    return ((words.unsqueeze(-1) >> places) & (2**form.bits - 1)).flatten(-2)
