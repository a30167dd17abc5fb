"""Fake quantization: a tensor rounded to the values that few bits can hold, still in its own dtype.

For quantization-aware training and for compression schedules (`deepspeed.compression`).
"""

from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import operator_for
from deepspeed.ops.quantizer.groups import OP, check_groups, from_levels, to_levels

_MIN_BITS, _MAX_BITS = 2, 16


def ds_quantizer(input: Tensor, groups: int = 1, bit_num: int = 8, sr: bool = False, asym: bool = False) -> Tensor:
    """DeepSpeed's name and arguments of `fake_quantize`.

    The result is a new tensor and `input` keeps its values: use what is returned.

    Args:
        input: floating, any shape.
        groups: number of groups, each with a scale of its own; must divide `input.numel()`.
        bit_num: 2 to 16.
        sr: round stochastically instead of to nearest.
        asym: scale from minimum to maximum instead of symmetrically around 0.

    Raises:
        ConfigError: as `fake_quantize`.
    """
    return fake_quantize(input, groups, bit_num, symmetric=not asym, stochastic=sr)


def fake_quantize(
    x: Tensor, num_groups: int = 1, num_bits: int = 8, *, symmetric: bool = True, stochastic: bool = False
) -> Tensor:
    """`dequantize(quantize(x))` in one step; formulas in `groups.py`. The result has x's shape and dtype. No gradient.

    Operator: `fake_quantize_groups(x, num_groups, num_bits, symmetric)`; stochastic rounding always runs in torch.

    Args:
        x: floating, any shape; left as it is.
        num_groups: must divide `x.numel()`.
        num_bits: 2 to 16.
        symmetric: around 0; False: from the minimum to the maximum of a group.
        stochastic: round x / scale up with the probability of its fraction (torch's generator of x's device): right on
            average, |x - x'| < scale.

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
    """`fake_quantize` in torch; what kernels are compared with."""
    levels, params = to_levels(x, num_groups, num_bits, symmetric, stochastic)
    return from_levels(levels, params).to(x.dtype).reshape(x.shape)
