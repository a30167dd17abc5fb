"""Group-wise quantization: int8 and packed int4 with fp32 scales, fake quantization, linear layers of packed weights.

    q, params = quantize(x, num_groups=x.numel() // 128, num_bits=4)
    y = dequantize(q, params, num_bits=4, shape=x.shape, dtype=x.dtype)     # |x - y| <= scale / 2

May import `errors` and `ops.operators`. Read `groups.py` first (formulas and layout), then `packed.py`.
"""

from deepspeed._absent import complete
from deepspeed.ops.quantizer.groups import dequantize, dequantize_reduce, ds_quantizer, fake_quantize, quantize
from deepspeed.ops.quantizer.packed import (
    PackedWeight,
    pack_weight,
    packed_grouped_linear,
    packed_linear,
    unpack_weight,
)

__all__ = [
    "PackedWeight",
    "dequantize",
    "dequantize_reduce",
    "ds_quantizer",
    "fake_quantize",
    "pack_weight",
    "packed_grouped_linear",
    "packed_linear",
    "quantize",
    "unpack_weight",
]

complete(__name__)
