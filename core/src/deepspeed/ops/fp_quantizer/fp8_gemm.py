"""`matmul_fp8`: the product with a matrix that `FP_Quantize` stored in 8 bits."""

from torch import Tensor

from deepspeed._absent import complete
from deepspeed.errors import ConfigError
from deepspeed.ops.fp_quantizer.quantize import FP_Quantize


def matmul_fp8(
    inp: Tensor, weight: Tensor, scale: Tensor, quantization_group_size: int, quantizer: FP_Quantize
) -> Tensor:
    """inp @ W, with W widened to the type that it had before; it is freed after the product.

    Args:
        inp: (..., in).
        weight, scale: what `quantizer.quantize(W, return_meta_tensor=True)` gave for a W (in, out).
        quantization_group_size: that of the quantizer.

    Raises:
        ConfigError: the sizes differ, or weight and scale are not of the tensor that the quantizer had last.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> quantizer = FP_Quantize(SimpleNamespace(group_size=2))
    >>> data, scale = quantizer.quantize(torch.tensor([[448.0, 1.0], [-1.0, 2.0]]), return_meta_tensor=True)
    >>> matmul_fp8(torch.tensor([1.0, 2.0]), data, scale, 2, quantizer)
    tensor([446.,   5.])
    """
    if quantization_group_size != quantizer.group_size:
        raise ConfigError(
            f"quantization_group_size: found {quantization_group_size}, but the quantizer has groups of "
            f"{quantizer.group_size}; give the one that made the weight"
        )
    return inp @ quantizer.dequantize(weight, scale=scale).to(inp.dtype)


matmul_fp8_fallback = matmul_fp8

complete(__name__)
