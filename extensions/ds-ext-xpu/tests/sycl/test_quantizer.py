"""The quantizer's kernels against the torch reference of core: the same bits."""

import pytest
import torch
from deepspeed.ops.quantizer import groups as reference
from deepspeed.ops.quantizer.groups import fake_quantize_reference

FORMS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def group_counts(numel):
    return sorted({1, min(max(numel, 1), 1023), *(count for count in (3, 7) if numel % count == 0)})


@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_equals_the_reference(ops, close, numel, dtype, num_bits, symmetric):
    x = close.numbers(numel, dtype, scale=3.0)
    for num_groups in (count for count in group_counts(numel) if numel % count == 0):
        size = numel // num_groups
        q, params = ops.quantize_groups(x, num_groups, num_bits, symmetric)
        wanted_q, wanted_params = reference.quantize_reference(x, num_groups, num_bits, symmetric)
        equal(q, wanted_q)
        equal(params, wanted_params)
        fake = ops.fake_quantize_groups(x, num_groups, num_bits, symmetric)
        equal(fake, fake_quantize_reference(x, num_groups, num_bits, symmetric))
        copies = torch.stack((q, q.flip(0), q)), torch.stack((params, params.flip(0) * 2, params))
        for out in OUTPUTS:
            wanted = reference.dequantize_reference(q, params, size, num_bits, out)
            equal(ops.dequantize_groups(q, params, size, num_bits, out), wanted)
            for mean in (True, False):
                wanted = reference.dequantize_reduce_reference(*copies, size, num_bits, mean, out)
                equal(ops.dequantize_reduce(*copies, size, num_bits, mean, out), wanted)


@pytest.mark.parametrize("num_bits", [2, 3, 5, 12, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_fake_quantization_equals_the_reference_at_every_width(ops, close, num_bits, symmetric):
    x = close.numbers(1024)
    wanted = fake_quantize_reference(x, 4, num_bits, symmetric)
    equal(ops.fake_quantize_groups(x, 4, num_bits, symmetric), wanted)


@pytest.mark.parametrize("value", [0.0, -0.0, 5.0, 1e-45, -3e38, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_special_groups_equal_the_reference(ops, value, num_bits, symmetric):
    for others in (value, 1.0):
        x = torch.full((2, 37), others)
        x[1, 5] = value
        x[0] = torch.linspace(-1, 1, 37)
        q, params = ops.quantize_groups(x, 2, num_bits, symmetric)
        wanted_q, wanted_params = reference.quantize_reference(x, 2, num_bits, symmetric)
        equal(q, wanted_q)
        equal(params, wanted_params)
        back = ops.dequantize_groups(q, params, 37, num_bits, torch.float32)
        assert back[0].isfinite().all()
        assert back[1].isnan().all() if not torch.tensor(value).isfinite() else back[1].isfinite().all()


@pytest.mark.parametrize("value", [0.0, 77.0, -77.0, float("nan"), float("-inf")])
@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
@pytest.mark.parametrize("at", [0, 16383, 16384, 40000])
def test_a_group_of_several_pieces_has_one_grid(ops, close, value, num_bits, symmetric, at):
    """What is special in one piece of a group holds for all of them, and for no other group."""
    x = close.numbers(2 * 40001).view(2, 40001)
    x[1, at] = value
    q, params = ops.quantize_groups(x, 2, num_bits, symmetric)
    wanted_q, wanted_params = reference.quantize_reference(x, 2, num_bits, symmetric)
    equal(q, wanted_q)
    equal(params, wanted_params)
    equal(ops.fake_quantize_groups(x, 2, 6, symmetric), fake_quantize_reference(x, 2, 6, symmetric))


def test_no_copies_add_up_to_zero(ops):
    q, params = torch.zeros(0, 2, 4, dtype=torch.int8), torch.zeros(0, 2, 1)
    equal(ops.dequantize_reduce(q, params, 4, 8, True, torch.float32), torch.zeros(2, 4))


def test_what_is_not_contiguous_is_read_in_order(ops, close):
    x = close.numbers(64).view(8, 8).t()
    equal(ops.quantize_groups(x, 4, 8, True)[0], ops.quantize_groups(x.contiguous(), 4, 8, True)[0])
    q, params = ops.quantize_groups(x.contiguous(), 8, 8, False)
    spread = torch.stack((q, q), -1)[..., 0]
    assert not spread.is_contiguous()
    wanted = ops.dequantize_groups(q, params, 8, 8, torch.float32)
    equal(ops.dequantize_groups(spread, params, 8, 8, torch.float32), wanted)


REFUSALS = (
    (lambda ops: ops.quantize_groups(torch.zeros(4), 3, 8, True), "num_groups: found 3, but it must be a divisor"),
    (lambda ops: ops.quantize_groups(torch.zeros(4), 0, 8, True), "num_groups: found 0"),
    (lambda ops: ops.quantize_groups(torch.zeros(4), 2, 5, True), "num_bits: found 5, but it must be 8 or 4"),
    (lambda ops: ops.quantize_groups(torch.zeros(4).double(), 2, 8, True), "x: found dtype float64"),
    (lambda ops: ops.fake_quantize_groups(torch.zeros(4), 2, 17, True), "num_bits: found 17, but it must be 2 to 16"),
    (lambda ops: dequantize(ops, q=torch.zeros(2, 4)), "q: found dtype float32, but it must be int8"),
    (lambda ops: dequantize(ops, q=torch.zeros(8, dtype=torch.int8)), r"q: found shape \(8\), but .* \(G, bytes\)"),
    (lambda ops: dequantize(ops, params=torch.zeros(3, 1)), r"params: found shape \(3, 1\), but it must be as q"),
    (lambda ops: dequantize(ops, params=torch.zeros(2, 1).half()), "params: found dtype float16"),
    (lambda ops: dequantize(ops, group_size=5), "group_size: found 5, but it must be what 4 bytes of q hold at 8 bits"),
    (lambda ops: dequantize(ops, dtype=torch.float64), "dtype: found another dtype"),
)


def dequantize(ops, *, q=None, params=None, group_size=4, dtype=torch.float32):
    q = torch.zeros(2, 4, dtype=torch.int8) if q is None else q
    return ops.dequantize_groups(q, torch.ones(2, 1) if params is None else params, group_size, 8, dtype)


@pytest.mark.parametrize(("call", "match"), REFUSALS, ids=[match for _, match in REFUSALS])
def test_a_wrong_argument_is_named(ops, call, match):
    with pytest.raises(RuntimeError, match=match):
        call(ops)
