"""Linear layers of few rows, plain and packed, and the gated activation: the operators against exact products."""

import pytest
import torch
from deepspeed.ops.quantizer import pack_weight, unpack_weight
from deepspeed.ops.transformer.activations import GATE_FORMS, gated_activation_reference
from ds_ext_cuda.op_builder.inference_core import InferenceCoreBuilder

# of a dtype's rounding; sums of up to 500 terms of size 1 in fp32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ROWS = (1, 2, 4, 5, 16)


@pytest.fixture(scope="module")
def ops(load_op):
    return load_op(InferenceCoreBuilder)


def close(found, wanted):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=2 * tolerance)


def product(x, weight, bias):
    wide = x.double() @ weight.double().t()
    return wide if bias is None else wide + bias.double()


@pytest.mark.parametrize("offset", [1, 0])
@pytest.mark.parametrize("cols", [1, 7, 32, 33, 520])
def test_linear_equals_the_product(ops, numbers, cols, dtype, offset):
    for outs in (1, 7, 9):
        weight = numbers(outs, cols, dtype=dtype, scale=cols**-0.5, offset=offset)
        bias = numbers(outs, dtype=dtype, seed=1)
        for rows in ROWS:
            x = numbers(rows, cols, dtype=dtype, seed=2, scale=1.0, offset=offset)
            close(ops.linear(x, weight, bias), product(x, weight, bias))
            close(ops.linear(x.view(rows, 1, cols), weight, None), product(x, weight, None).view(rows, 1, outs))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "cols", "group_size"), [(8, 33, 0), (8, 500, 20), (8, 512, 128), (4, 34, 0), (4, 96, 32), (4, 6, 2)]
)
def test_packed_linear_equals_the_product(ops, numbers, bits, cols, group_size, symmetric, dtype):
    for outs in (1, 9):
        weight, bias = numbers(outs, cols, scale=cols**-0.5), numbers(outs, seed=1)
        packed = pack_weight(weight, bits, group_size, symmetric)
        given = packed.data, packed.scales, packed.zeros
        for rows in ROWS:
            x = numbers(rows, cols, dtype=dtype, seed=2, scale=1.0, offset=0)
            close(ops.packed_linear(x, *given, bias, bits), product(x, unpack_weight(packed), bias))
            close(ops.packed_linear(x, *given, None, bits, 8), product(x, unpack_weight(packed), None))


@pytest.mark.parametrize("form", list(GATE_FORMS))
@pytest.mark.parametrize("cols", [1, 7, 264])
def test_gated_activation_equals_the_reference(ops, numbers, cols, form, dtype):
    both = numbers(2, 3, 2 * cols, dtype=dtype, offset=0)
    for gate, up in (both.chunk(2, -1), (both[..., :cols].contiguous(), both[..., cols:])):
        found = ops.gated_activation(gate, up, GATE_FORMS[form])
        assert found.is_contiguous()
        close(found, gated_activation_reference(gate, up, form).double())
    turned = both.transpose(0, 1)
    close(ops.gated_activation(turned, turned, 0), gated_activation_reference(turned, turned, "silu").double())


def test_nothing_to_compute(ops, numbers):
    assert ops.linear(numbers(0, 4), numbers(3, 4), None).shape == (0, 3)
    assert ops.linear(numbers(2, 4), numbers(0, 4), None).shape == (2, 0)
    assert ops.gated_activation(numbers(2, 0), numbers(2, 0), 0).shape == (2, 0)
    assert torch.equal(ops.linear(numbers(2, 0), numbers(3, 0), None), torch.zeros(2, 3, device=numbers(1).device))


def test_refuses_by_name(ops, numbers):
    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=f"ds_cuda::{op}: {match}"):
            getattr(ops, op)(*args)

    x, weight = numbers(2, 8), numbers(4, 8)
    packed = pack_weight(weight, 8, 4)
    refused(r"x: found shape \(2, 8\), but it must be with 4 at the end", "linear", x, weight[:, :4], None)
    refused("x: found 17 rows, but it must be of 16 or fewer", "linear", numbers(17, 8), weight, None)
    refused("weight: found dtype bfloat16", "linear", x, weight.bfloat16(), None)
    refused(r"weight: found shape \(32\)", "linear", x, weight.reshape(-1), None)
    refused(r"bias: found shape \(3\), but it must be \(4\), one for each output", "linear", x, weight, numbers(3))
    refused("data: found dtype float32", "packed_linear", x, weight, packed.scales, None, None, 8)
    refused("bits: found 3", "packed_linear", x, packed.data, packed.scales, None, None, 3)
    refused("input_bits: found 4", "packed_linear", x, packed.data, packed.scales, None, None, 8, 4)
    refused(r"scales: found shape \(3, 2\)", "packed_linear", x, packed.data, packed.scales[:3], None, None, 8)
    refused(
        r"zeros: found shape \(4, 1\)", "packed_linear", x, packed.data, packed.scales, packed.scales[:, :1], None, 8
    )
    refused("activation: found 3", "gated_activation", x, x, 3)
    refused(r"up: found shape \(4, 8\)", "gated_activation", x, weight, 0)


def test_opcheck(ops, numbers):
    x, packed = numbers(2, 8), pack_weight(numbers(4, 8), 8, 4)
    torch.library.opcheck(ops.linear.default, (x, numbers(4, 8), None))
    torch.library.opcheck(ops.packed_linear.default, (x, packed.data, packed.scales, None, None, 8))
    torch.library.opcheck(ops.gated_activation.default, (x, x, 1))
