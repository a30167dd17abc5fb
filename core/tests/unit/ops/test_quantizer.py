"""Quantization by group: the error bound, the layout, and what is refused. Runs on the torch reference."""

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer import dequantize, dequantize_reduce, ds_quantizer, fake_quantize, quantize
from deepspeed.ops.quantizer.groups import fake_quantize_reference


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "quantizer")


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("num_groups", [1, 3, 21, 693])
@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_round_trip_is_within_half_a_scale(num_groups, num_bits, symmetric, dtype):
    x = numbers(21, 33).to(dtype) + (0 if symmetric else 10)
    q, params = quantize(x, num_groups, num_bits, symmetric)
    size = x.numel() // num_groups
    assert (q.dtype, q.shape) == (torch.int8, (num_groups, (size * num_bits + 7) // 8))
    assert (params.dtype, params.shape) == (torch.float32, (num_groups, 1 if symmetric else 2))
    error = (dequantize(q, params, num_bits, shape=x.shape) - x.float()).abs().reshape(num_groups, size)
    assert bool((error <= params[:, :1] * 0.5001 + 1e-6).all())


def test_the_largest_and_smallest_survive():
    x = torch.tensor([-3.0, 0.1, 0.2, 3.0, 10.0, 12.0, 13.0, 14.0])
    q, params = quantize(x, 2, 8, symmetric=False)
    assert q[:, 0].tolist() == [-128, -128]
    assert q[:, 3].tolist() == [127, 127]
    back = dequantize(q, params)
    torch.testing.assert_close(back[:, [0, 3]], torch.tensor([[-3.0, 3.0], [10.0, 14.0]]), rtol=1e-6, atol=0)
    symmetric, scale = quantize(x, 2)
    assert symmetric.min() == -127
    torch.testing.assert_close(scale, torch.tensor([[3.0], [14.0]]) / 127)


def test_ties_go_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0, 0.0])  # a scale of 1
    assert quantize(x, 1)[0].tolist() == [[0, 2, 2, 0, -2, -2, 127, 0]]


def test_int4_packs_the_first_of_two_into_the_low_nibble():
    x = torch.tensor([7.0, -7.0, 1.0, -1.0, 3.0])  # a scale of 1; five: the last high nibble is 0
    q, params = quantize(x, 1, 4)
    assert q.view(torch.uint8).tolist() == [[0x97, 0xF1, 0x03]]
    assert dequantize(q, params, 4, shape=(5,)).tolist() == x.tolist()
    assert dequantize(q, params, 4).tolist() == [[*x.tolist(), 0.0]]


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_constants_and_tiny_groups(num_bits, symmetric):
    x = torch.tensor([[0.0] * 6, [1e-40] * 6, [-0.0] * 6])
    q, params = quantize(x, 3, num_bits, symmetric)
    back = dequantize(q, params, num_bits, shape=x.shape)
    assert torch.equal(back[0], torch.zeros(6))
    assert (back - x).abs().max() < 1.2e-38
    constant = torch.full((5,), 2.5)
    back = dequantize(*quantize(constant, 1, num_bits, False), num_bits, shape=(5,))
    assert torch.equal(back, constant)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_nan_and_inf_come_back_as_nan_in_their_group_alone(value, symmetric):
    x = numbers(2, 8)
    x[1, 3] = value
    back = dequantize(*quantize(x, 2, 8, symmetric), shape=x.shape)
    assert back[0].isfinite().all()
    assert back[1].isnan().all()


def test_empty_tensors():
    for num_bits in (8, 4):
        q, params = quantize(torch.empty(0, 3), 4, num_bits)
        assert (q.shape, params.shape) == ((4, 0), (4, 1))
        assert dequantize(q, params, num_bits, shape=(0, 3)).shape == (0, 3)
    assert ds_quantizer(torch.empty(0)).shape == (0,)


def test_dequantize_reduce_adds_copies_up():
    copies = numbers(3, 4, 10)
    q, params = zip(*(quantize(copy, 4, 4, False) for copy in copies), strict=True)
    q, params = torch.stack(q), torch.stack(params)
    apart = torch.stack([dequantize(*one, 4) for one in zip(q, params, strict=True)])
    torch.testing.assert_close(dequantize_reduce(q, params, 4), apart.sum(0))
    half = dequantize_reduce(q, params, 4, mean=True, dtype=torch.bfloat16, shape=(40,))
    torch.testing.assert_close(half, apart.mean(0).flatten().bfloat16(), rtol=2**-7, atol=1e-6)
    assert dequantize_reduce(q[:0], params[:0], 4, mean=True).count_nonzero() == 0


@pytest.mark.parametrize("asym", [False, True])
def test_ds_quantizer_is_quantize_and_back_in_the_dtype_of_its_input(asym):
    x = numbers(6, 10).bfloat16()
    before = x.clone()
    found = ds_quantizer(x, groups=6, bit_num=8, asym=asym)
    assert torch.equal(x, before)
    assert torch.equal(found, dequantize(*quantize(x, 6, 8, not asym), shape=x.shape, dtype=x.dtype))
    assert len(fake_quantize(x, 1, 2, symmetric=not asym).unique()) <= 4


def test_stochastic_rounding_is_right_on_average():
    torch.manual_seed(0)
    x = torch.full((1, 20_001), 0.3)
    x[0, 0] = 127  # a scale of 1
    found = ds_quantizer(x, 1, 8, sr=True)[0, 1:]
    assert set(found.tolist()) == {0.0, 1.0}
    assert abs(found.mean().item() - 0.3) < 0.02
    assert torch.equal(ds_quantizer(x, 1, 8)[0, 1:], torch.zeros(20_000))
    spread = numbers(4, 64)
    rounded = fake_quantize_reference(spread, 4, 8, False, stochastic=True)
    scale = (spread.amax(1) - spread.amin(1)) / 255
    assert bool(((rounded - spread).abs().amax(1) < scale * 1.001).all())


def test_refuses_by_name():
    x = torch.ones(2, 5)
    q, params = quantize(x, 2)
    for match, call in (
        (r"num_groups: found 3, but it must divide the 10 elements of x, of shape \(2, 5\)", lambda: quantize(x, 3)),
        ("num_groups: found 0", lambda: fake_quantize(x, 0)),
        ("num_bits: found 6, but it must be 8 or 4", lambda: quantize(x, 2, 6)),
        ("num_bits: found 1, but it must be 2 to 16", lambda: ds_quantizer(x, 1, 1)),
        ("x: found dtype torch.int64", lambda: quantize(torch.arange(4), 2)),
        (r"q: found torch.float32 of shape \(2, 5\)", lambda: dequantize(q.float(), params)),
        (
            r"q: found torch.int8 of shape \(2, 5\), but it must be int8 of shape \(C, G",
            lambda: dequantize_reduce(q, params),
        ),
        (r"params: found torch.float32 of shape \(1, 1\)", lambda: dequantize(q, params[:1])),
        ("dtype: found torch.float64", lambda: dequantize(q, params, dtype=torch.float64)),
        (
            r"shape: found \(2, 6\), 12 elements, but q holds 2 groups of 5 bytes",
            lambda: dequantize(q, params, shape=(2, 6)),
        ),
        (r"shape: found \(11,\)", lambda: dequantize(q, params, shape=(11,))),
    ):
        with pytest.raises(ConfigError, match=match):
            call()
