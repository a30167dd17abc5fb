"""Packed weights: the error bound, products, slices, and what is refused. Runs on the torch reference."""

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer import PackedWeight, pack_weight, packed_grouped_linear, packed_linear, unpack_weight
from deepspeed.ops.quantizer.packed import stack_packed


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "quantizer,inference_core_ops")


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (8, 3), (8, 32), (4, 0), (4, 2), (4, 32)])
def test_unpacked_is_within_half_a_scale(bits, group_size, symmetric):
    weight = numbers(7, 96) + (0 if symmetric else 3)
    packed = pack_weight(weight, bits, group_size, symmetric)
    size = group_size or 96
    assert packed.shape == (7, 96)
    assert packed.data.shape == (7, 96 * bits // 8)
    assert packed.scales.shape == (7, 96 // size)
    assert (packed.zeros is None) == symmetric
    assert packed.num_bytes == 7 * 96 * bits // 8 + 4 * packed.scales.numel() * (1 if symmetric else 2)
    groups = weight.view(7, -1, size)
    found = unpack_weight(packed)
    error = (found - weight).abs().view_as(groups).amax(-1)
    assert bool((error <= packed.scales * 0.5001 + 1e-6).all())
    levels = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1) / levels if symmetric else (groups.amax(-1) - groups.amin(-1)) / (2 * levels + 1)
    torch.testing.assert_close(packed.scales, scale)
    x, bias = numbers(5, 96, seed=1), numbers(7, seed=2)
    torch.testing.assert_close(packed_linear(x, packed, bias), x @ found.t() + bias)
    halves = packed_linear(x.bfloat16(), packed, bias)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), x @ found.t() + bias, rtol=3e-2, atol=0.5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_slices_are_those_of_the_unpacked_weight(bits, symmetric):
    weight = numbers(6, 64)
    for group_size in (0, 16):
        packed = pack_weight(weight, bits, group_size, symmetric)
        whole = unpack_weight(packed)
        assert torch.equal(unpack_weight(packed.narrow(0, 2, 3)), whole[2:5])
        cut = packed.narrow(1, 16, 32)
        assert torch.equal(unpack_weight(cut), whole[:, 16:48])
        assert cut.data.is_contiguous()
    odd = pack_weight(weight, bits, 0, symmetric)
    with pytest.raises(ConfigError, match=r"dim 0: found \[4, 8\), but the weight has 6"):
        odd.narrow(0, 4, 4)
    with pytest.raises(ConfigError, match=r"dim 1: found \[8, 24\).*groups of 16.*multiples of 16"):
        packed.narrow(1, 8, 16)
    assert packed.to("meta").data.device.type == "meta"


def test_a_gradient_reaches_x():
    packed = pack_weight(numbers(3, 4))
    x = numbers(2, 4, seed=1).requires_grad_()
    packed_linear(x, packed).sum().backward()
    torch.testing.assert_close(x.grad, unpack_weight(packed).sum(0).expand(2, 4))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 1], [0, 0, 0], [20, 1, 17]])
def test_each_weight_has_its_rows(counts, bits, symmetric):
    parts = [pack_weight(numbers(4, 32, seed=seed), bits, 16, symmetric) for seed in range(3)]
    packed = stack_packed(parts)
    for dtype in (torch.float, torch.bfloat16):
        x, bias = numbers(sum(counts), 32, seed=9).to(dtype), numbers(3, 4, seed=8)
        each = zip(x.split(counts), parts, bias, strict=True)
        expected = torch.cat([packed_linear(rows, part, its) for rows, part, its in each])
        torch.testing.assert_close(packed_grouped_linear(x, packed, counts, bias), expected)
    if not any(counts):
        return
    x = numbers(sum(counts), 32, seed=9).requires_grad_()
    packed_grouped_linear(x, packed, counts).sum().backward()
    slopes = torch.stack([unpack_weight(part).sum(0) for part in parts]).repeat_interleave(torch.tensor(counts), 0)
    torch.testing.assert_close(x.grad, slopes)


def test_refuses_by_name():
    weight = numbers(3, 96)
    packed = pack_weight(weight, 4, 32)
    for match, call in (
        ("bits: found 5, but it must be 8 or 4", lambda: pack_weight(weight, 5)),
        (r"weight: found shape \(96,\), but it must be \(out, in\)", lambda: pack_weight(weight[0])),
        (
            r"group_size: found 64, but with 8 bits it must divide the 96 columns of the weight; for example 32, 96",
            lambda: pack_weight(weight, 8, 64),
        ),
        ("group_size: found 3, but with 4 bits .* even, because a byte holds two", lambda: pack_weight(weight, 4, 3)),
        ("group_size: found -1", lambda: pack_weight(weight, 8, -1)),
        ("33 columns of the weight, even.*which has none: leave it", lambda: pack_weight(numbers(2, 33), 4)),
        ("a weight without elements", lambda: pack_weight(numbers(0, 32))),
        (
            r"x: found torch.float32 of shape \(2, 95\), but .* with 96 at the end",
            lambda: packed_linear(weight[:2, 1:], packed),
        ),
        ("x: found torch.float64", lambda: packed_linear(weight.double(), packed)),
        (r"bias: found shape \(96,\), but it must be \(3,\)", lambda: packed_linear(weight, packed, weight[0])),
        (
            r"counts: found \[1, 1\] for x of shape \(3, 96\) and packed weights of \(3, 96\)",
            lambda: packed_grouped_linear(weight, packed, [1, 1]),
        ),
        (
            r"bias: found shape \(96,\), but it must be \(1, 3\)",
            lambda: packed_grouped_linear(weight, packed, [3], weight[0]),
        ),
        (
            r"data: found torch.int8 of shape \(3, 48\), but for a weight of shape \(3, 96\) with 8 bits",
            lambda: PackedWeight(packed.data, packed.scales, None, 8, 32, (3, 96)),
        ),
        (
            r"zeros: found torch.float32 of shape \(3, 2\)",
            lambda: PackedWeight(packed.data, packed.scales, torch.zeros(3, 2), 4, 32, (3, 96)),
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            call()
