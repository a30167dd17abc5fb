"""Quantization of tensors to floating-point numbers of 8, 6 or 12 bits, under DeepSpeed's names.

    stored = FP_Quantize(QuantizationConfig(group_size=128)).quantize(weight, q_bits=6)

May import `errors` and `ops.quantizer`, which has the formats (`floats.py`).
"""

from deepspeed._absent import complete
from deepspeed.ops.fp_quantizer.quantize import FP_Quantize, Quantizer, matmul_fp8

__all__ = ["FP_Quantize", "Quantizer", "matmul_fp8"]

complete(__name__)
