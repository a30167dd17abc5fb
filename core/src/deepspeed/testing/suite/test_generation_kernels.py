"""Kernels of a generation step (linear layers with few rows, packed weights, gates, layers) against host references.

Each kernel is called through its function in `deepspeed.ops` with tensors on the device. fp32 results agree to 1e-5,
and half-precision results to one unit in the last place.
"""

from dataclasses import replace

import pytest
import torch

from deepspeed.ops import transformer
from deepspeed.ops.quantizer import pack_weight, packed_grouped_linear, packed_linear, unpack_weight
from deepspeed.ops.transformer.activations import gated_activation_reference
from deepspeed.ops.transformer.decode_attention import decode_attention_reference
from deepspeed.ops.transformer.decoder_layer import decoder_layer_reference
from deepspeed.testing import requirements
from deepspeed.testing.suite.test_tensor_kernels import (
    _EPS,
    _TOLERANCE,
    _assert_close,
    _random,
    each_dtype,
    each_scheme,
    each_size,
)

each_row_count = pytest.mark.parametrize("rows", [1, 3, 8, 16])


@each_row_count
@pytest.mark.parametrize("cols", [1, 33, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_of_few_rows_equals_its_reference(
    device: torch.device, dtype: torch.dtype, cols: int, rows: int
) -> None:
    requirements.op("inference_core_ops").check()
    x, weight = _random(rows, cols, dtype=dtype), _random(7, cols, dtype=dtype, seed=1) / cols**0.5
    bias = _random(7, dtype=dtype, seed=2)
    found = transformer.linear(x.to(device), weight.to(device), bias.to(device))
    _assert_close(found, (x.float() @ weight.float().t() + bias.float()).to(dtype))


@each_row_count
@each_scheme
@pytest.mark.parametrize(("num_bits", "group_size"), [(8, 0), (8, 32), (4, 0), (4, 32)])
@each_dtype
def test_packed_linear_equals_its_reference(
    device: torch.device, dtype: torch.dtype, num_bits: int, group_size: int, symmetric: bool, rows: int
) -> None:
    requirements.op("inference_core_ops").check()
    packed = pack_weight(_random(7, 96, seed=1) / 10, num_bits, group_size, symmetric)
    x, bias = _random(rows, 96, dtype=dtype), _random(7, seed=2)
    found = packed_linear(x.to(device), packed.to(device), bias.to(device))
    _assert_close(found, (x.float() @ unpack_weight(packed).t() + bias).to(dtype))


@each_scheme
@pytest.mark.parametrize("counts", [[1, 0, 3], [16, 0, 0], [0, 20, 1]], ids=str)
@pytest.mark.parametrize("num_bits", [8, 4])
@each_dtype
def test_packed_grouped_linear_equals_its_reference(
    device: torch.device, dtype: torch.dtype, num_bits: int, counts: list[int], symmetric: bool
) -> None:
    requirements.op("inference_core_ops").check()
    packed = pack_weight(_random(21, 96, seed=1) / 10, num_bits, 32, symmetric)
    x, bias = _random(sum(counts), 96, dtype=dtype), _random(3, 7, seed=2)
    found = packed_grouped_linear(x.to(device), packed.to(device), counts, bias.to(device))
    weights, rows = unpack_weight(packed).view(3, 7, 96), x.float().split(counts)
    expected = [each @ weight.t() + its for each, weight, its in zip(rows, weights, bias, strict=True)]
    _assert_close(found, torch.cat(expected).to(dtype))


@each_row_count
@pytest.mark.parametrize(("num_bits", "group_size"), [(8, 0), (8, 32), (4, 0), (4, 32)])
@each_dtype
def test_packed_linear_rounds_its_input_to_8_bits_at_most(
    device: torch.device, dtype: torch.dtype, num_bits: int, group_size: int, rows: int
) -> None:
    requirements.op("inference_core_ops").check()
    packed = replace(pack_weight(_random(7, 96, seed=1) / 10, num_bits, group_size), input_bits=8)
    x, weight = _random(rows, 96, dtype=dtype), unpack_weight(packed)
    off = (packed_linear(x.to(device), packed.to(device)).cpu().float() - x.float() @ weight.t()).abs()
    step = x.float().unflatten(-1, (-1, packed.group_size)).abs().amax(-1, keepdim=True) / 127
    bound = (step / 2 * torch.ones(packed.group_size)).flatten(-2) @ weight.abs().t()
    assert (off <= bound + 2 * _TOLERANCE[dtype]).all()


@pytest.mark.parametrize("form", ["silu", "gelu", "gelu_tanh"])
@each_dtype
@each_size
def test_gated_activation_equals_its_reference(device: torch.device, size: int, dtype: torch.dtype, form: str) -> None:
    requirements.op("inference_core_ops").check()
    gate, up = _random(2, 2 * size, dtype=dtype).chunk(2, -1)
    found = transformer.gated_activation(gate.to(device), up.to(device), form)
    _assert_close(found, gated_activation_reference(gate, up, form))


@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
@pytest.mark.parametrize(("num_queries", "window", "alibi"), [(1, None, False), (2, 5, True), (9, None, False)])
@pytest.mark.parametrize("kv_heads", [1, 4])
@each_dtype
def test_decode_attention_equals_its_reference(
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    num_queries: int,
    window: int | None,
    alibi: bool,
    paged: bool,
) -> None:
    requirements.op("ragged_device_ops").check()
    shape = (9, 8, kv_heads, 20) if paged else (2, kv_heads, 32, 20)
    q = _random(2, 4, num_queries, 20, dtype=dtype)
    k, v = (_random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    lengths = torch.tensor([31, 9])
    table = torch.tensor([[3, 0, 8, 1], [5, 2, 0, 0]], dtype=torch.int32) if paged else None
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    found = transformer.decode_attention(
        q.to(device),
        k.to(device),
        v.to(device),
        lengths.to(device),
        0.2,
        None if table is None else table.to(device),
        None if slopes is None else slopes.to(device),
        window,
    )
    _assert_close(found, decode_attention_reference(q, k, v, lengths, 0.2, table, slopes, window))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("num_bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoder_layer_equals_its_reference(device: torch.device, dtype: torch.dtype, num_bits: int, rows: int) -> None:
    requirements.op("inference_core_ops").check()

    def linear(outs: int, cols: int, seed: int) -> transformer.Linear:
        weight = _random(outs, cols, dtype=dtype, seed=seed) / cols**0.5
        return transformer.Linear(pack_weight(weight, num_bits) if num_bits else weight, _random(outs, seed=seed) / 10)

    norm = transformer.Norm(1 + _random(16, seed=5) / 10)
    layer = transformer.DecoderLayer(
        *(linear(32, 16, 1), linear(16, 16, 2), linear(48, 16, 3), linear(16, 24, 4)),
        *(norm, norm),
        heads=2,
        kv_heads=1,
        head_dim=8,
        eps=_EPS,
        scale=0.3,
    )
    x, keys, values = (_random(*shape, dtype=dtype) for shape in ((rows, 16), (rows, 1, 12, 8), (rows, 1, 12, 8)))
    angles, starts = _random(rows, 4), torch.arange(rows)
    there = [each.clone().to(device) for each in (keys, values)]
    rest = [each.to(device) for each in (starts, angles.cos(), angles.sin())]
    moved = layer.map(lambda each: each.to(device))
    found = transformer.decoder_layer(x.to(device), there[0], there[1], 9, moved, rest[0], rest[1], rest[2])
    _assert_close(found, decoder_layer_reference(x, keys, values, 9, layer, starts, angles.cos(), angles.sin()))
    for mine, theirs in zip(there, (keys, values), strict=True):
        _assert_close(mine, theirs)
