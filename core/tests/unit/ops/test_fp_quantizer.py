"""Tensors in 12, 8 and 6 bits with an exponent: codes, the error bound, layout, DeepSpeed's quantizer and refusals."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.errors import ConfigError, StateError
from deepspeed.ops.fp_quantizer import FP_Quantize, Quantizer, matmul_fp8
from deepspeed.ops.quantizer.floats import E3M2, E4M3, E5M2, E7M4, dequantize_floats, quantize_floats

FORMS = [E4M3, E5M2, E3M2, E7M4]
OF_BITS = {8: E4M3, 6: E3M2, 12: E7M4}
named = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantizer(group_size=32):
    return FP_Quantize(SimpleNamespace(group_size=group_size))


def values_of(form):
    """Every number of a format up to the largest, from its definition, ascending."""
    found = []
    for exponent in range(2**form.exponent_bits):
        for mantissa in range(2**form.mantissa_bits):
            hidden = 1 if exponent else 0
            power = max(exponent, 1) - (2 ** (form.exponent_bits - 1) - 1)
            found.append((hidden + mantissa / 2**form.mantissa_bits) * 2.0**power)
    sizes = torch.tensor([each for each in found if each <= form.largest], dtype=torch.float64)
    assert sizes[-1] == form.largest
    return sizes


def nearest(x, sizes):
    """Of `sizes`, ties to the even place in it: brute force."""
    distances = (x.abs().double().unsqueeze(-1) - sizes).abs()
    places = distances.argmin(-1)
    after = (places + 1).clamp_max(len(sizes) - 1)
    is_tie = distances.gather(-1, places[:, None]) == distances.gather(-1, after[:, None])
    places = torch.where(is_tie[:, 0] & (places % 2 == 1), after, places)
    return (sizes[places] * torch.where(x < 0, -1, 1)).float()


@named
def test_a_number_is_the_nearest_of_the_format(form):
    sizes = values_of(form)
    halves = ((sizes[1:] + sizes[:-1]) / 2).float()  # ties
    x = torch.cat((sizes.float(), -sizes.float(), halves, -halves, numbers(1000) * form.largest / 4, numbers(1000)))
    x = torch.nn.functional.pad(x.clamp(-form.largest, form.largest), (0, -len(x) % 8))
    x[-1] = form.largest  # the scale is 1
    data, scales = quantize_floats(x, 1, form)
    assert scales.item() == 1
    found = dequantize_floats(data, scales, form).view(-1)
    torch.testing.assert_close(found, nearest(x, sizes), rtol=0, atol=0)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_codes_are_those_of_torch(form):
    ours = replace(form, dtype=None)
    x = torch.cat((numbers(64, 64), numbers(64, 64, seed=1) * 1e-4, -numbers(64, 64).abs()), 1)
    data, scales = quantize_floats(x, 64, ours)
    expected, same_scales = quantize_floats(x, 64, form)
    assert torch.equal(data, expected)
    assert torch.equal(scales, same_scales)
    assert torch.equal(dequantize_floats(data, scales, ours), dequantize_floats(data, scales, form))


@named
def test_errors_are_within_the_bound(form):
    x = torch.cat((numbers(16, 96), numbers(16, 96, seed=1) ** 5, torch.zeros(1, 96)))
    data, scales = quantize_floats(x, 33, form)
    assert data.shape == (33, 96 * form.bits // 8)
    error = (dequantize_floats(data, scales, form) - x).abs()
    relative, below = 2.0 ** -(form.mantissa_bits + 1), 2.0 ** -(form.bias + form.mantissa_bits)
    assert bool((error <= torch.maximum(relative * x.abs(), below * scales) * (1 + 1e-6)).all())
    assert bool((error[-1] == 0).all())
    smaller = dequantize_floats(*quantize_floats(x, 33, form), form, torch.bfloat16)
    assert torch.equal(smaller, dequantize_floats(data, scales, form).bfloat16())


def test_six_and_twelve_bits_fill_bytes_from_the_lowest_bit():
    # e3m2 of 28, 1, -5, 0: 0 111 11, 0 011 00, 1 101 01, 0
    word = 0b011111 | 0b001100 << 6 | 0b110101 << 12
    data, _ = quantize_floats(torch.tensor([28.0, 1.0, -5.0, 0.0]), 1, E3M2)
    assert data.tolist() == [list(word.to_bytes(3, "little"))]
    # e7m4 of 496, -1: 0 1000111 1111, 1 0111111 0000
    word = 0b0_1000111_1111 | 0b1_0111111_0000 << 12
    data, _ = quantize_floats(torch.tensor([496.0, -1.0]), 1, E7M4)
    assert data.tolist() == [list(word.to_bytes(3, "little"))]


@named
def test_stochastic_rounding_is_right_on_average(form):
    torch.manual_seed(0)
    sizes = values_of(form)
    low, high = sizes[-5].item(), sizes[-4].item()
    x = torch.full((2**14,), low + (high - low) / 4)
    x[0] = form.largest
    found = dequantize_floats(*quantize_floats(x, 1, form, stochastic=True), form).view(-1)[1:]
    assert set(found.tolist()) == {low, high}
    # a quarter of 16383 draws, 6 standard deviations
    assert abs((found == high).float().mean().item() - 0.25) < 6 * (0.25 * 0.75 / 2**14) ** 0.5


@named
def test_a_group_that_is_not_finite_comes_back_as_nan(form):
    x = numbers(3, 8)
    x[0, 1], x[1, 2] = float("inf"), float("nan")
    found = dequantize_floats(*quantize_floats(x, 3, form), form)
    assert bool(found[:2].isnan().all())
    assert bool(found[2].isfinite().all())


@pytest.mark.parametrize("bits", OF_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_quantizer_keeps_shape_and_type(bits, dtype):
    x = numbers(4, 6, 64).to(dtype)
    one = quantizer()
    assert isinstance(one, Quantizer)
    stored = one.quantize(x, q_bits=bits)
    assert stored.dtype == torch.uint8
    assert stored.shape == (48, 4 * bits + 4)
    found = one.dequantize(stored, q_bits=bits)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    expected = dequantize_floats(*quantize_floats(x, 48, OF_BITS[bits]), OF_BITS[bits], dtype).view_as(x)
    assert torch.equal(found, expected)

    data, scales = one.quantize(x, q_bits=bits, return_meta_tensor=True)
    assert data.shape == (4, 6, 64 * bits // 8)
    assert torch.equal(scales, one.get_scales())
    assert torch.equal(one.dequantize(data, q_bits=bits, scale=scales), expected)

    some = torch.tensor([3, 0, 3])
    assert torch.equal(one.selective_dequantize(stored, some, q_bits=bits), expected[some])
    assert torch.equal(one.selective_dequantize(data, some, q_bits=bits, scale=scales), expected[some])
    out = torch.empty(3, 6, 64)
    assert one.selective_dequantize(stored, some, out, q_bits=bits) is out
    assert torch.equal(out.to(dtype), expected[some])

    other = quantizer()
    out = torch.empty(24, 64, dtype=dtype)
    assert other.dequantize(stored, fp_out=out, q_bits=bits) is out
    assert torch.equal(out.view_as(x), expected)
    other.orig_shape, other.orig_dtype = x.shape, dtype
    assert torch.equal(other.dequantize(stored.view(torch.int8), q_bits=bits), expected)


def test_eight_bits_have_two_mantissas():
    x = numbers(64)
    one = quantizer()
    found = [one.dequantize(one.quantize(x, 8, mantissa), q_mantisa_bits=mantissa) for mantissa in (3, 2)]
    near, far = ((each - x).abs().sum() for each in found)
    assert 0 < 1.5 * near < far


def test_the_product_is_that_of_the_widened_matrix():
    x, weight = numbers(5, 64), numbers(64, 32, seed=1)
    one = quantizer()
    data, scale = one.quantize(weight, return_meta_tensor=True)
    torch.testing.assert_close(matmul_fp8(x, data, scale, 32, one), x @ one.dequantize(data, scale=scale))
    with pytest.raises(ConfigError, match=r"quantization_group_size: found 64, but the quantizer has groups of 32"):
        matmul_fp8(x, data, scale, 64, one)


def test_what_does_not_fit_is_named():
    x = numbers(4, 48)
    one = quantizer()
    with pytest.raises(StateError, match="give fp_out"):
        one.dequantize(torch.zeros(36, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"q_bits: found 5, and 3 bits of mantissa; give 8 .* 6 or 12"):
        one.quantize(x, q_bits=5)
    with pytest.raises(ConfigError, match=r"q_bits: found 8, and 4"):
        one.quantize(x, q_mantisa_bits=4)
    with pytest.raises(ConfigError, match=r"group_size: found 32, but it must divide the 80 elements"):
        one.quantize(numbers(80))
    for wrong, found in (("x", "str"), (torch.ones(32, dtype=torch.int32), "torch.int32")):
        with pytest.raises(TypeError, match=f"input: found {found}; give a floating tensor"):
            one.quantize(wrong)
    with pytest.raises(ConfigError, match=r"groups of 6 elements, but with 6 bits 4 elements"):
        quantize_floats(x, 32, E3M2)
    stored = one.quantize(x)
    with pytest.raises(ConfigError, match=r"rows of 28 bytes, the scale behind them"):
        one.dequantize(stored, q_bits=6)
    with pytest.raises(ConfigError, match=r"found 6 groups of 32, but the tensor has the shape \(4, 24\)"):
        one.dequantize(stored, fp_out=torch.empty(4, 24))
    with pytest.raises(ConfigError, match="must lie within one index"):
        one.selective_dequantize(stored, torch.tensor([0]))
    data, scales = one.quantize(x, return_meta_tensor=True)
    with pytest.raises(ConfigError, match=r"scale: found shape \(3, 1\), but input_q has 6 groups"):
        one.dequantize(data, scale=scales[:3])
