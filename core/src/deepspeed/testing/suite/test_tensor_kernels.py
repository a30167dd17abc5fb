"""Elementwise and row kernels (norms, gelu, rotary, quantizer) against their torch references on the host.

Each kernel is called through its function in `deepspeed.ops` with tensors on the device, and compared with the
reference function on the host: fp32 to 1e-5, half precision to one unit in the last place.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.ops import transformer
from deepspeed.ops.quantizer import dequantize, dequantize_reduce, fake_quantize, quantize
from deepspeed.ops.quantizer.groups import (
    dequantize_reduce_reference,
    dequantize_reference,
    fake_quantize_reference,
    quantize_reference,
)
from deepspeed.ops.transformer.activations import bias_gelu_reference, gelu_reference
from deepspeed.ops.transformer.norm import layer_norm_reference, rms_norm_reference
from deepspeed.ops.transformer.rotary import apply_rotary_reference, rotary_table
from deepspeed.testing import requirements

_SIZES = (0, 1, 7, 1023, 65537)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
_EPS = 1e-5

each_dtype = pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=str)
each_size = pytest.mark.parametrize("size", _SIZES)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    limit = _TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().float(), wanted.float(), rtol=limit, atol=limit)


# ----- transformer ---------------------------------------------------------------------------------------------------


def _added(norm: Callable[..., Tensor], x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return norm(x + residual, *rest), x + residual


def _rows(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Return x and a residual with 3 rows, and a weight."""
    width = max(numel, 1)
    rows = 3 if numel else 0
    return [_random(rows, width, dtype=dtype), _random(rows, width, dtype=dtype, seed=1), _random(width, seed=2)]


@each_dtype
@each_size
def test_layer_norm_equals_its_reference(device: torch.device, size: int, dtype: torch.dtype) -> None:
    requirements.op("transformer_inference").check()
    x, residual, weight = _rows(size, dtype)
    bias = _random(weight.numel(), seed=3)
    there = [tensor.to(device) for tensor in (x, residual, weight, bias)]
    found = transformer.layer_norm(there[0], there[2], there[3], _EPS)
    _assert_close(found, layer_norm_reference(x, weight, bias, _EPS))
    both = transformer.layer_norm_residual(there[0], there[1], there[2], there[3], _EPS)
    for one, other in zip(both, _added(layer_norm_reference, x, residual, weight, bias, _EPS), strict=True):
        _assert_close(one, other)


@each_dtype
@each_size
def test_rms_norm_equals_its_reference(device: torch.device, size: int, dtype: torch.dtype) -> None:
    requirements.op("transformer_inference").check()
    x, residual, weight = _rows(size, dtype)
    there = [tensor.to(device) for tensor in (x, residual, weight)]
    found = transformer.rms_norm(there[0], there[2], _EPS)
    _assert_close(found, rms_norm_reference(x, weight, _EPS))
    both = transformer.rms_norm_residual(there[0], there[1], there[2], _EPS)
    for one, other in zip(both, _added(rms_norm_reference, x, residual, weight, _EPS), strict=True):
        _assert_close(one, other)


@pytest.mark.parametrize("form", ["none", "tanh"])
@each_dtype
@each_size
def test_gelu_equals_its_reference(device: torch.device, size: int, dtype: torch.dtype, form: str) -> None:
    requirements.op("transformer_inference").check()
    x, bias = _random(2, size, dtype=dtype), _random(size, dtype=dtype, seed=1)
    _assert_close(transformer.gelu(x.to(device), form), gelu_reference(x, form))
    found = transformer.bias_gelu(x.to(device), bias.to(device), form)
    _assert_close(found, bias_gelu_reference(x, bias, form))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 7, 1023])
@each_dtype
def test_rotary_equals_its_reference(
    device: torch.device, dtype: torch.dtype, length: int, seq_dim: int, interleaved: bool
) -> None:
    requirements.op("transformer_inference").check()
    shape = (2, length, 3, 10) if seq_dim == 1 else (2, 3, length, 10)
    x = _random(*shape, dtype=dtype)
    cos, sin = rotary_table(torch.arange(length), 8)
    found = transformer.apply_rotary(
        x.to(device), cos.to(device), sin.to(device), interleaved=interleaved, seq_dim=seq_dim
    )
    _assert_close(found, apply_rotary_reference(x, cos, sin, interleaved, seq_dim))


# ----- quantizer -----------------------------------------------------------------------------------------------------

each_scheme = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
each_width = pytest.mark.parametrize("num_bits", [8, 4])


@each_scheme
@each_width
@each_dtype
@each_size
def test_quantize_equals_its_reference(
    device: torch.device, size: int, dtype: torch.dtype, num_bits: int, symmetric: bool
) -> None:
    requirements.op("quantizer").check()
    x = _random(2, size, dtype=dtype)
    q, params = quantize(x.to(device), 2, num_bits, symmetric)
    wanted_q, wanted_params = quantize_reference(x, 2, num_bits, symmetric)
    torch.testing.assert_close(params.cpu(), wanted_params, rtol=1e-5, atol=1e-30)
    # a value halfway between two integers may round to the other one if the device divides differently
    assert q.shape == wanted_q.shape
    assert int((q.cpu() != wanted_q).sum()) <= wanted_q.numel() / 1000
    back = dequantize(q, params, num_bits, shape=x.shape, dtype=dtype).cpu().float()
    half_a_step = wanted_params[:, :1] / 2
    rounding = (x.float().abs() + half_a_step) * (2 * torch.finfo(dtype).eps + 1e-4)
    assert bool(((back - x.float()).abs() <= half_a_step + rounding + 1e-6).all())


@each_scheme
@each_width
@each_dtype
@each_size
def test_dequantize_equals_its_reference(
    device: torch.device, size: int, dtype: torch.dtype, num_bits: int, symmetric: bool
) -> None:
    requirements.op("quantizer").check()
    pairs = [quantize_reference(_random(2, size, seed=seed), 2, num_bits, symmetric) for seed in range(3)]
    q, params = pairs[0]
    found = dequantize(q.to(device), params.to(device), num_bits, shape=(2, size), dtype=dtype)
    _assert_close(found, dequantize_reference(q, params, size, num_bits, dtype))
    qs, all_params = torch.stack([q for q, _ in pairs]), torch.stack([params for _, params in pairs])
    for mean in (False, True):
        summed = dequantize_reduce(
            qs.to(device), all_params.to(device), num_bits, shape=(2, size), dtype=dtype, mean=mean
        )
        _assert_close(summed, dequantize_reduce_reference(qs, all_params, size, num_bits, mean, dtype))


@each_scheme
@pytest.mark.parametrize("num_bits", [2, 8])
@each_dtype
@each_size
def test_fake_quantize_equals_its_reference(
    device: torch.device, size: int, dtype: torch.dtype, num_bits: int, symmetric: bool
) -> None:
    requirements.op("quantizer").check()
    x = _random(2, size, dtype=dtype)
    found = fake_quantize(x.to(device), 2, num_bits, symmetric=symmetric).cpu()
    wanted = fake_quantize_reference(x, 2, num_bits, symmetric)
    assert found.dtype == dtype
    differs = ~torch.isclose(found.float(), wanted.float(), rtol=_TOLERANCE[dtype], atol=1e-5)
    assert int(differs.sum()) <= size / 500  # ties may round to the other side
