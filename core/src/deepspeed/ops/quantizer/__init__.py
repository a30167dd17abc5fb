"""Quantization by group: int8 and packed int4 with fp32 scales, and fake quantization, with their torch reference.

    q, params = quantize(x, num_groups=x.numel() // 128, num_bits=4)
    y = dequantize(q, params, num_bits=4, shape=x.shape, dtype=x.dtype)     # |x - y| <= scale / 2

May import `errors` and `ops.operators`. Read `groups.py` first (formulas and layout), then `fake.py`.
"""

from deepspeed.ops.quantizer.fake import ds_quantizer, fake_quantize
from deepspeed.ops.quantizer.groups import dequantize, dequantize_reduce, quantize

__all__ = ["dequantize", "dequantize_reduce", "ds_quantizer", "fake_quantize", "quantize"]
