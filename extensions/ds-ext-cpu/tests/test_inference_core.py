"""Linear layers of few rows, plain and packed, and the gated activation: the operators against exact products."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from deepspeed.ops import registry
from deepspeed.ops.quantizer import pack_weight, packed_grouped_linear, packed_linear, unpack_weight
from deepspeed.ops.quantizer.packed import stack_packed
from deepspeed.ops.transformer import gated_activation, linear
from deepspeed.ops.transformer.activations import GATE_FORMS, gated_activation_reference

# of a dtype's rounding; sums of up to 500 terms of size 1 in fp32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ROWS = (1, 2, 3, 5, 8, 9, 16)


@pytest.fixture(scope="module")
def ops():
    return registry.require("inference_core_ops")


def numbers(*shape, dtype=torch.float32, seed=0):
    """Random numbers that begin one element into their storage."""
    numel = torch.Size(shape).numel()
    return torch.randn(numel + 1, generator=torch.Generator().manual_seed(seed)).to(dtype)[1:].view(shape)


def product(x, weight, bias):
    wide = x.double() @ weight.double().t()
    return wide if bias is None else wide + bias.double()


def close(found, wanted, factor=1):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * factor)


def packed_operator(ops, x, packed, bias=None):
    return ops.packed_linear(x, packed.data, packed.scales, packed.zeros, bias, packed.bits)


@pytest.mark.parametrize("cols", [1, 7, 32, 33, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_equals_the_product(ops, cols, dtype):
    for outs in (1, 4, 7):
        weight, bias = numbers(outs, cols, dtype=dtype) / cols**0.5, numbers(outs, dtype=dtype, seed=1)
        for rows in ROWS:
            x = numbers(rows, cols, dtype=dtype, seed=2)
            close(ops.linear(x, weight, bias), product(x, weight, bias))
            close(ops.linear(x.view(rows, 1, cols), weight, None), product(x, weight, None).view(rows, 1, outs))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "cols", "group_size"), [(8, 33, 0), (8, 500, 20), (8, 384, 128), (8, 96, 32)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_packed_linear_equals_the_product(ops, bits, cols, group_size, symmetric, dtype):
    check_packed(ops, bits, cols, group_size, symmetric, dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("cols", "group_size"), [(34, 0), (500, 20), (384, 128), (96, 32), (6, 2)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_packed_linear_of_4_bits_equals_the_product(ops, cols, group_size, symmetric, dtype):
    check_packed(ops, 4, cols, group_size, symmetric, dtype)


def check_packed(ops, bits, cols, group_size, symmetric, dtype):
    for outs in (1, 6):
        weight, bias = numbers(outs, cols) / cols**0.5 + (0 if symmetric else 0.1), numbers(outs, seed=1)
        packed = pack_weight(weight, bits, group_size, symmetric)
        for rows in ROWS:
            x = numbers(rows, cols, dtype=dtype, seed=2)
            close(packed_operator(ops, x, packed, bias), product(x, unpack_weight(packed), bias), factor=2)
        close(packed_operator(ops, x, packed), product(x, unpack_weight(packed), None), factor=2)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "cols", "group_size"), [(8, 33, 0), (8, 96, 32), (4, 34, 0), (4, 500, 20)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("counts", [[1, 0, 2], [0, 0, 0], [16, 3, 9], [0, 1, 0]], ids=str)
def test_packed_grouped_linear_equals_the_products(ops, counts, dtype, bits, cols, group_size, symmetric):
    for outs in (1, 6):
        parts = [
            pack_weight(
                numbers(outs, cols, seed=seed) / cols**0.5 + (0 if symmetric else 0.1), bits, group_size, symmetric
            )
            for seed in (3, 4, 5)
        ]
        packed, bias = stack_packed(parts), numbers(3, outs, seed=1)
        x = numbers(sum(counts), cols, dtype=dtype, seed=2)
        given = (packed.data, packed.scales, packed.zeros)
        for its_bias in (bias, None):
            found = ops.packed_grouped_linear(x, *given, None if its_bias is None else bias.flatten(), counts, bits)
            rows = x.split(counts)
            wanted = [
                product(its, unpack_weight(part), None if its_bias is None else bias[number])
                for number, (its, part) in enumerate(zip(rows, parts, strict=True))
            ]
            close(found, torch.cat(wanted), factor=2)
            alone = [
                packed_operator(ops, its, part, None if its_bias is None else bias[number])
                for number, (its, part) in enumerate(zip(rows, parts, strict=True))
            ]
            assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_the_outputs_of_all_experts(ops, threads):
    before = torch.get_num_threads()
    parts = [pack_weight(numbers(517, 512, seed=seed) / 16) for seed in range(5)]
    counts, packed = [2, 0, 1, 0, 5], stack_packed(parts)
    x = numbers(sum(counts), 512)
    try:
        torch.set_num_threads(threads)
        found = ops.packed_grouped_linear(x, packed.data, packed.scales, None, None, counts, 8)
    finally:
        torch.set_num_threads(before)
    rows = zip(x.split(counts), parts, strict=True)
    close(found, torch.cat([product(its, unpack_weight(part), None) for its, part in rows]), factor=4)


# this process multiplies bytes: the inputs of packed layers may be rounded to 8 bits
ROUNDS = "avx512_vnni" in Path("/proc/cpuinfo").read_text() and os.environ.get("DS_CPU_ISA", "avx512") == "avx512"


def rounded(x, group_size):
    """x in 8 bits of the greatest number of each group."""
    groups = x.float().unflatten(-1, (-1, group_size))
    greatest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / greatest)).round() * (greatest / 127)).flatten(-2)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "cols", "group_size"), [(8, 33, 0), (8, 384, 128), (8, 96, 32), (4, 34, 0), (4, 500, 20)]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_inputs_of_8_bits(ops, bits, cols, group_size, symmetric, dtype):
    for outs in (1, 6):
        weight, bias = numbers(outs, cols) / cols**0.5, numbers(outs, seed=1)
        packed = replace(pack_weight(weight, bits, group_size, symmetric), input_bits=8)
        for rows in ROWS:
            x = numbers(rows, cols, dtype=dtype, seed=2)
            found = ops.packed_linear(x, *packed.arguments(bias))
            exact, wide = product(x, unpack_weight(packed), bias), unpack_weight(packed).double()
            bound = (rounded(x, packed.group_size) - x).abs().double() @ wide.abs().t()
            assert ((found - exact).abs() <= bound + 2 * TOLERANCE[dtype] * (1 + exact.abs())).all()
            if ROUNDS and dtype != torch.float16:
                close(found, product(rounded(x, packed.group_size), unpack_weight(packed), bias), factor=2)
            else:
                close(found, exact, factor=2)


def test_every_integer_is_read(ops):
    """All levels of both widths, at every place of a block."""
    for bits in (8, 4):
        least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        levels = torch.arange(least, most + 1).repeat(4096 // 2**bits)
        weight = torch.stack([levels.roll(shift) for shift in range(7)]).float()
        packed = pack_weight(weight, bits, symmetric=False)
        for place in (*range(40), 4095):
            x = torch.zeros(1, 4096)
            x[0, place] = 1.0
            torch.testing.assert_close(packed_operator(ops, x, packed)[0], weight[:, place], rtol=0, atol=1e-3)


def test_nan_and_inf_stay_in_their_row(ops):
    weight = numbers(5, 40).abs()
    x = numbers(3, 40)
    x[1, 7], x[2, 39] = float("nan"), float("inf")
    packed = pack_weight(weight)
    of_bytes = ops.packed_linear(x, *replace(packed, input_bits=8).arguments(None))
    for found in (ops.linear(x, weight, None), packed_operator(ops, x, packed), of_bytes):
        assert found[0].isfinite().all()
        assert found[1].isnan().all()
        assert not found[2].isfinite().any()


def test_accepts_non_contiguous_tensors(ops):
    weight, x, bias = numbers(40, 6).t(), numbers(40, 3).t(), numbers(12)[::2]
    close(ops.linear(x, weight, bias), product(x, weight, bias), factor=8)
    packed = pack_weight(weight, 8, 20, symmetric=False)
    wide = [torch.stack((one, one), -1)[..., 0] for one in (packed.data, packed.scales, packed.zeros)]
    close(ops.packed_linear(x, *wide, bias, 8), product(x, unpack_weight(packed), bias), factor=8)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_the_outputs(ops, threads):
    before = torch.get_num_threads()
    weight, x = numbers(1031, 512) / 16, numbers(3, 512)
    try:
        torch.set_num_threads(threads)
        close(ops.linear(x, weight, None), product(x, weight, None), factor=4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", list(GATE_FORMS))
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("cols", [0, 1, 7, 513, 1500])
def test_gated_activation_equals_the_reference(ops, cols, dtype, name):
    """Also of halves of one tensor, of strided tensors, and of numbers whose exp is at the end of fp32."""
    both = numbers(3, 2, 2 * cols, dtype=dtype) * 4
    gate, up = both.chunk(2, -1)
    pairs = [
        (gate, up),
        (gate.contiguous(), up),
        (gate.transpose(0, 1), up.transpose(0, 1)),
        (gate[..., 0:0], up[..., 0:0]),
    ]
    pairs += [(gate[..., ::2], up[..., ::2]), (gate[0, 0], up[0, 0])]
    for gate, up in pairs:
        found = ops.gated_activation(gate, up, GATE_FORMS[name])
        assert found.is_contiguous()
        torch.testing.assert_close(
            found, gated_activation_reference(gate, up, name), rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
        )
    far = torch.tensor([-1000.0, -88.0, -87.0, 87.0, 88.0, 89.0, 1000.0, float("nan")])
    found = ops.gated_activation(far, torch.ones(8), GATE_FORMS[name])
    torch.testing.assert_close(
        found, gated_activation_reference(far, torch.ones(8), name), atol=1e-30, rtol=2e-6, equal_nan=True
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize(
    ("outs", "cols", "group_size"), [(9, 200, 0), (4, 64, 0), (6, 192, 64), (5, 96, 32), (7, 2, 0)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_bf16_with_outliers(ops, bits, outs, cols, group_size, rows):
    """Off by the rounding of bf16, and 2^-16 of the greatest |x| of a group times the weights there."""
    x = numbers(rows, cols, dtype=torch.bfloat16)
    x[:, ::31] *= 1000
    packed = pack_weight(numbers(outs, cols, seed=1), bits, group_size)
    weight, bias = unpack_weight(packed).double(), numbers(outs, seed=2)
    exact = x.double() @ weight.t() + bias
    groups = x.double().abs().unflatten(1, (-1, packed.group_size)), weight.abs().unflatten(1, (-1, packed.group_size))
    bound = 2**-16 * torch.einsum("rg,og->ro", groups[0].amax(2), groups[1].sum(2))
    found = packed_operator(ops, x, packed, bias)
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + bound).all()


def test_rows_of_bf16_that_are_small_or_zero(ops):
    packed = pack_weight(numbers(5, 64))
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[1], x[2] = 1e-20, 1e-37
    found = packed_operator(ops, x, packed)
    assert (found[0] == 0).all()
    close(found[1] * 1e20, (x[1].double() @ unpack_weight(packed).double().t()) * 1e20)
    assert found[2].abs().max() < 1e-29


def test_refuses_by_name(ops):
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    packed = pack_weight(weight, 8, 4, symmetric=False)
    good = (x, packed.data, packed.scales, packed.zeros, None, 8)

    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=f"{op}: {match}"):
            getattr(ops, op)(*args)

    refused("x: found 17 rows, but it must be of 16 or fewer", "linear", torch.ones(17, 8), weight, None)
    refused("weight: found dtype float16, but it must be float32 or bfloat16", "linear", x.half(), weight.half(), None)
    refused("x: found dtype bfloat16, but it must be dtype float32 as weight has", "linear", x.bfloat16(), weight, None)
    refused(r"x: found shape \(2, 7\), but it must be with 8 at the end", "linear", x[:, :7], weight, None)
    refused(r"weight: found shape \(8\), but it must be \(out, in\)", "linear", x, weight[0], None)
    refused(r"bias: found shape \(8\)", "linear", x, weight, x[0])
    refused("weight: found a tensor on meta", "linear", x, weight.to("meta"), None)
    for index, match, wrong in (
        (0, "x: found dtype float64", x.double()),
        (0, r"x: found shape \(2, 4\), but it must be with 8", x[:, :4]),
        (1, "data: found dtype float32, but it must be int8", weight),
        (2, r"scales: found shape \(3, 3\), but it must be with a divisor of the 8 bytes", torch.ones(3, 3)),
        (2, r"scales: found shape \(2, 2\), but it must be \(3, groups\)", torch.ones(2, 2)),
        (2, "scales: found dtype bfloat16", packed.scales.bfloat16()),
        (3, r"zeros: found shape \(3, 1\), but it must be shape \(3, 2\) as in scales", torch.ones(3, 1)),
        (4, r"bias: found shape \(4\)", torch.ones(4)),
        (5, "bits: found 5, but it must be 8 or 4", 5),
    ):
        arguments = [*good[:index], wrong, *good[index + 1 :]]
        if index == 2 and wrong.shape == (3, 3):
            arguments[3] = None
        refused(match, "packed_linear", *arguments)
    of_groups = (x, packed.data, packed.scales, packed.zeros, None, [1, 0, 1], 8)
    for index, match, wrong in (
        (0, r"x: found shape \(2, 4\), but it must be \(rows, 8\)", x[:, :4]),
        (0, r"x: found shape \(1, 2, 8\), but it must be \(rows, 8\)", x[None]),
        (0, "x: found dtype float64", x.double()),
        (2, r"scales: found shape \(2, 2\), but it must be \(3, groups\)", torch.ones(2, 2)),
        (4, r"bias: found shape \(1\)", torch.ones(1)),
        (5, "counts: found 2 numbers, but it must be a divisor of the 3 rows of data", [1, 1]),
        (5, "counts: found 0 numbers", []),
        (5, "counts: found 3 rows, but it must be the 2 of x", [1, 1, 1]),
        (5, r"counts\[1\]: found -1, but it must be 0 to 16", [2, -1, 1]),
        (5, r"counts\[2\]: found 17, but it must be 0 to 16", [0, 0, 17]),
        (6, "bits: found 5, but it must be 8 or 4", 5),
    ):
        refused(match, "packed_grouped_linear", *of_groups[:index], wrong, *of_groups[index + 1 :])
    refused("up: found dtype bfloat16", "gated_activation", x, x.bfloat16(), 0)
    refused(r"up: found shape \(3, 8\)", "gated_activation", x, weight, 0)
    refused("activation: found 3, but it must be 0, 1 or 2", "gated_activation", x, x, 3)
    refused("gate: found a tensor without dimensions", "gated_activation", torch.tensor(1.0), torch.tensor(1.0), 0)


def test_opcheck(ops):
    x, weight, bias = numbers(3, 2, 12, dtype=torch.bfloat16), numbers(5, 12, dtype=torch.bfloat16), numbers(5)
    packed = pack_weight(weight, 4, 6, symmetric=False)
    for operator, args in (
        (ops.linear, (x, weight, bias)),
        (ops.linear, (x, weight, None)),
        (ops.packed_linear, (x, packed.data, packed.scales, packed.zeros, bias, 4)),
        (ops.packed_linear, (x.float(), packed.data, packed.scales, None, None, 4)),
        (
            ops.packed_grouped_linear,
            (x.flatten(0, 1), packed.data, packed.scales, packed.zeros, None, [1, 0, 2, 3, 0], 4),
        ),
        (ops.gated_activation, (x, x.flip(0), 1)),
    ):
        torch.library.opcheck(operator.default, args)


def test_the_fronts_run_these_operators_and_compile(ops, monkeypatch):
    weight, down = numbers(24, 10), numbers(10, 12)
    packed = pack_weight(down, 4)

    def feed_forward(x):
        gate, up = linear(x, weight).chunk(2, -1)
        return packed_linear(gated_activation(gate, up), packed)

    x = numbers(2, 1, 10, seed=1)
    with torch.profiler.profile(acc_events=True) as profile:
        found = feed_forward(x)
    names = {event.key for event in profile.key_averages()}
    assert {"ds_cpu::linear", "ds_cpu::packed_linear", "ds_cpu::gated_activation"} <= names
    assert torch.equal(torch.compile(feed_forward, fullgraph=True, backend="aot_eager")(x), found)
    monkeypatch.setenv("DS_OPS_DISABLE", "inference_core_ops")
    torch.testing.assert_close(found, feed_forward(x), rtol=1e-5, atol=1e-5)


def test_the_front_of_experts_runs_the_operator_where_all_have_few_rows(ops, monkeypatch):
    packed, bias = pack_weight(numbers(6, 8)), numbers(3, 2, seed=4)
    for counts, dtype, is_served in (
        ([0, 16, 2], torch.float32, True),
        ([1, 0, 0], torch.bfloat16, True),
        ([1, 17, 2], torch.float32, False),
    ):
        x = numbers(sum(counts), 8, dtype=dtype)
        with torch.profiler.profile(acc_events=True) as profile:
            found = packed_grouped_linear(x, packed, counts, bias)
        names = {event.key for event in profile.key_averages()}
        assert ("ds_cpu::packed_grouped_linear" in names) == is_served
        assert ("ds_cpu::packed_linear" in names) != is_served  # each by itself
        with monkeypatch.context() as patch:
            patch.setenv("DS_OPS_DISABLE", "inference_core_ops")
            close(found, packed_grouped_linear(x, packed, counts, bias).double(), factor=4)


def test_many_rows_and_gradients_go_to_torch(ops):
    weight = numbers(6, 8)
    packed = pack_weight(weight)
    for x in (numbers(17, 8), numbers(2, 8).requires_grad_()):
        with torch.profiler.profile(acc_events=True) as profile:
            plain, quantized = linear(x, weight), packed_linear(x, packed)
        assert not {"ds_cpu::linear", "ds_cpu::packed_linear"} & {event.key for event in profile.key_averages()}
        torch.testing.assert_close(plain, F.linear(x, weight))
        torch.testing.assert_close(quantized, F.linear(x, unpack_weight(packed)))
    quantized.sum().backward()
    torch.testing.assert_close(x.grad, unpack_weight(packed).sum(0).expand(2, 8))
