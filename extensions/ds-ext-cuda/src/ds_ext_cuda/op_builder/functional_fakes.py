"""What operators that make new tensors give when tensors have no memory: shapes and dtypes, for torch.compile and meta.

Called by `register_fakes` of their builders, once, after the library was loaded.
"""

import torch
from torch import Tensor


def register_quantizer_fakes() -> None:
    """Of the quantizer's operators."""
    torch.library.register_fake("ds_cuda::quantize_groups", _quantize)
    torch.library.register_fake("ds_cuda::swizzled_quantize_groups", _swizzled_quantize)
    torch.library.register_fake("ds_cuda::fake_quantize_groups", _fake_quantize)
    torch.library.register_fake("ds_cuda::dequantize_groups", _dequantize)
    torch.library.register_fake("ds_cuda::dequantize_reduce", _dequantize_reduce)


def register_inference_fakes() -> None:
    """Of norms, gelu, rotary, softmax and additions."""
    torch.library.register_fake("ds_cuda::layer_norm", _layer_norm)
    torch.library.register_fake("ds_cuda::layer_norm_residual", _layer_norm_residual)
    torch.library.register_fake("ds_cuda::rms_norm", _rms_norm)
    torch.library.register_fake("ds_cuda::rms_norm_residual", _rms_norm_residual)
    torch.library.register_fake("ds_cuda::gelu", _gelu)
    torch.library.register_fake("ds_cuda::bias_gelu", _bias_gelu)
    torch.library.register_fake("ds_cuda::bias_residual_add", _bias_residual_add)
    torch.library.register_fake("ds_cuda::rotary", _rotary)
    torch.library.register_fake("ds_cuda::masked_softmax", _masked_softmax)


def _quantize(x: Tensor, num_groups: int, num_bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    group_size = x.numel() // num_groups
    q = x.new_empty((num_groups, (group_size * num_bits + 7) // 8), dtype=torch.int8)
    return q, x.new_empty((num_groups, 1 if symmetric else 2), dtype=torch.float32)


def _swizzled_quantize(
    x: Tensor, num_groups: int, num_bits: int, symmetric: bool, num_nodes: int, devices_per_node: int
) -> tuple[Tensor, Tensor]:
    return _quantize(x, num_groups, num_bits, symmetric)


def _fake_quantize(x: Tensor, num_groups: int, num_bits: int, symmetric: bool) -> Tensor:
    return x.new_empty(x.shape)


def _dequantize(q: Tensor, params: Tensor, group_size: int, num_bits: int, dtype: torch.dtype) -> Tensor:
    _check_device("dequantize_groups", "q", q, params=params)
    return q.new_empty((q.shape[-2], group_size), dtype=dtype)


def _dequantize_reduce(
    q: Tensor, params: Tensor, group_size: int, num_bits: int, mean: bool, dtype: torch.dtype
) -> Tensor:
    _check_device("dequantize_reduce", "q", q, params=params)
    return q.new_empty((q.shape[-2], group_size), dtype=dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return _like("layer_norm", x, weight=weight, bias=bias)


def _layer_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return _like("layer_norm_residual", x, residual=residual, weight=weight, bias=bias), x.new_empty(x.shape)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return _like("rms_norm", x, weight=weight)


def _rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _like("rms_norm_residual", x, residual=residual, weight=weight), x.new_empty(x.shape)


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    return _like("gelu", x)


def _bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return _like("bias_gelu", x, bias=bias)


def _bias_residual_add(x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return _like("bias_residual_add", x, bias=bias, residual=residual)


def _masked_softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return _like("masked_softmax", x, mask=mask)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    return _like("rotary", x, cos=cos, sin=sin)


def _like(op: str, x: Tensor, **others: Tensor | None) -> Tensor:
    """A contiguous tensor of x's shape and dtype, once the others were found beside x."""
    _check_device(op, "x", x, **others)
    return x.new_empty(x.shape)


def _check_device(op: str, model_name: str, model: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != model.device:
            raise RuntimeError(
                f"ds_cuda::{op}: {name}: found a tensor on {tensor.device}, but it must be on {model.device} as "
                f"{model_name} is"
            )
