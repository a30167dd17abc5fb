"""The quantizer's operators against the torch reference: the same bits, for every dtype, size and layout."""

import pytest
import torch
from deepspeed.ops import operators
from deepspeed.ops.quantizer import dequantize, dequantize_reduce, fake_quantize, quantize
from deepspeed.ops.quantizer import groups as reference
from deepspeed.ops.quantizer.groups import fake_quantize_reference
from ds_ext_cuda.op_builder.quantizer import QuantizerBuilder

FORMS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]


@pytest.fixture(scope="module")
def ops(load_op):
    return load_op(QuantizerBuilder)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def check_groups(ops, x, num_groups, num_bits, symmetric):
    """Everything that can be done with `x`."""
    q, params = ops.quantize_groups(x, num_groups, num_bits, symmetric)
    wanted_q, wanted_params = reference.quantize_reference(x, num_groups, num_bits, symmetric)
    same(q, wanted_q)
    same(params, wanted_params)
    same(
        ops.fake_quantize_groups(x, num_groups, num_bits, symmetric),
        fake_quantize_reference(x, num_groups, num_bits, symmetric),
    )
    return q, params


def check_numbers(ops, q, params, size, num_bits, dtype):
    copies = torch.stack((q, q.flip(0), q)), torch.stack((params, params.flip(0) * 2, params))
    same(
        ops.dequantize_groups(q, params, size, num_bits, dtype),
        reference.dequantize_reference(q, params, size, num_bits, dtype),
    )
    for mean in (True, False):
        same(
            ops.dequantize_reduce(*copies, size, num_bits, mean, dtype),
            reference.dequantize_reduce_reference(*copies, size, num_bits, mean, dtype),
        )


@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_equals_the_reference(ops, numbers, numel, dtype, num_bits, symmetric):
    for offset in (1, 0):  # misaligned, aligned
        x = numbers(numel, dtype=dtype, offset=offset)
        for num_groups in sorted({1, max(numel, 1), *(count for count in (3, 7) if numel % count == 0)}):
            q, params = check_groups(ops, x, num_groups, num_bits, symmetric)
            check_numbers(ops, q, params, numel // num_groups, num_bits, dtype)


# group sizes that fall to some lanes of a warp, to a warp, a block, and to pieces; the last is odd
@pytest.mark.parametrize("group_size", [8, 16, 24, 64, 128, 256, 512, 1016, 2048, 8200, 16384, 20480, 33001])
@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_every_path_equals_the_reference(ops, numbers, dtype, group_size, num_bits, symmetric):
    num_groups = 3 if group_size < 2048 else 2
    x = numbers(num_groups * group_size, dtype=dtype, offset=0)
    q, params = check_groups(ops, x, num_groups, num_bits, symmetric)
    check_numbers(ops, q, params, group_size, num_bits, dtype)


@pytest.mark.parametrize("num_bits", [2, 3, 5, 12, 16])
def test_fake_quantization_equals_the_reference_at_every_width(ops, numbers, num_bits):
    x = numbers(1024)
    for symmetric in (True, False):
        same(
            ops.fake_quantize_groups(x, 4, num_bits, symmetric),
            fake_quantize_reference(x, 4, num_bits, symmetric),
        )


@pytest.mark.parametrize("value", [0.0, -0.0, 5.0, 1e-45, -3e38, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_special_groups_equal_the_reference(ops, device, value, num_bits, symmetric):
    for others in (value, 1.0):
        x = torch.full((2, 37), others, device=device)
        x[1, 5] = value
        x[0] = torch.linspace(-1, 1, 37)
        q, params = check_groups(ops, x, 2, num_bits, symmetric)
        back = ops.dequantize_groups(q, params, 37, num_bits, torch.float32)
        assert back[0].isfinite().all()
        assert back[1].isnan().all() if not torch.tensor(value).isfinite() else back[1].isfinite().all()


@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (2, 1), (1, 4), (2, 4), (3, 2)])
@pytest.mark.parametrize("group_size", [7, 64, 2048, 9000])
def test_swizzled_groups_are_the_groups_in_another_order(ops, numbers, num_bits, symmetric, nodes, devices, group_size):
    num_groups = 2 * nodes * devices
    x = numbers(num_groups * group_size, dtype=torch.bfloat16, offset=0)
    for found, wanted in zip(
        ops.swizzled_quantize_groups(x, num_groups, num_bits, symmetric, nodes, devices),
        reference.quantize_reference(x, num_groups, num_bits, symmetric),
        strict=True,
    ):
        same(found, wanted.unflatten(0, (nodes, devices, 2)).transpose(0, 1).flatten(0, 2))


def test_a_sum_of_no_copies_is_zero(ops, device):
    q, params = torch.empty(0, 2, 4, dtype=torch.int8, device=device), torch.empty(0, 2, 1, device=device)
    same(ops.dequantize_reduce(q, params, 4, 8, True, torch.float32), torch.zeros(2, 4, device=device))


def test_accepts_non_contiguous_tensors(ops, numbers, device):
    x = numbers(60, dtype=torch.bfloat16).view(6, 10)
    for one in (x.t(), x[:, ::2], x.expand(2, 6, 10)):
        check_groups(ops, one, 2, 4, False)
        assert ops.fake_quantize_groups(one, 2, 8, True).is_contiguous()
    q, params = ops.quantize_groups(x, 6, 8, False)
    wide = torch.zeros(6, 4, device=device)
    wide[:, 1::2] = params
    found = ops.dequantize_groups(q.t().contiguous().t(), wide[:, 1::2], 10, 8, torch.float32)
    same(found, reference.dequantize_reference(q, params, 10, 8, torch.float32))


def test_quantized_bytes_that_begin_anywhere(ops, numbers, device):
    """`q` may be a part of a received buffer."""
    for num_bits in (8, 4):
        q, params = ops.quantize_groups(numbers(96, offset=0), 3, num_bits, True)
        for skipped in (1, 8):  # 8: enough for narrow accesses, not for wide ones
            held = torch.zeros(q.numel() + skipped, dtype=torch.int8, device=device)
            held[skipped:] = q.flatten()
            found = ops.dequantize_groups(held[skipped:].view(q.shape), params, 32, num_bits, torch.float16)
            same(found, reference.dequantize_reference(q, params, 32, num_bits, torch.float16))


def test_refuses_by_name(ops, device):
    x = torch.ones(8, device=device)
    q, params = ops.quantize_groups(x, 2, 8, True)

    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=f"ds_cuda::{op}: {match}"):
            getattr(ops, op)(*args)

    for op, more in (("quantize_groups", ()), ("fake_quantize_groups", ()), ("swizzled_quantize_groups", (1, 1))):
        refused("x: found dtype int64", op, torch.arange(8, device=device), 2, 8, True, *more)
        refused("num_groups: found 3, but it must be a divisor of the 8 elements of x", op, x, 3, 8, True, *more)
        refused("num_groups: found 0", op, x, 0, 8, True, *more)
        refused("num_bits: found 1", op, x, 2, 1, True, *more)
    refused("num_bits: found 5, but it must be 8 or 4", "quantize_groups", x, 2, 5, True)
    refused("num_nodes: found 0", "swizzled_quantize_groups", x, 4, 8, True, 0, 1)
    refused("devices_per_node: found 2, .* 2 nodes .* the 2 groups", "swizzled_quantize_groups", x, 2, 8, True, 2, 2)
    for op, dims in (("dequantize_groups", ()), ("dequantize_reduce", (1,))):
        mean = () if op == "dequantize_groups" else (True,)
        good_q, good_params = q.reshape(*dims, 2, 4), params.reshape(*dims, 2, 1)
        refused("q: found dtype float32", op, good_q.float(), good_params, 4, 8, *mean, torch.float32)
        refused("params: found dtype bfloat16", op, good_q, good_params.bfloat16(), 4, 8, *mean, torch.float32)
        refused(r"q: found shape \(8\)", op, q.flatten(), good_params, 4, 8, *mean, torch.float32)
        wrong = torch.ones(*dims, 3, 1, device=device)
        refused(r"params: found shape \(.*3, 1\)", op, good_q, wrong, 4, 8, *mean, torch.float32)
        refused("group_size: found 5, but it must be what 4 bytes", op, good_q, good_params, 5, 8, *mean, torch.float32)
        refused("dtype: found another dtype", op, good_q, good_params, 4, 8, *mean, torch.float64)
        refused("params: found a tensor on meta", op, good_q, good_params.to("meta"), 4, 8, *mean, torch.float32)


def test_meta_tensors_give_the_shapes_of_real_ones(ops, device):
    x = torch.ones(6, 7, device=device)
    for num_bits, symmetric in FORMS:
        for op, more in ((ops.quantize_groups, ()), (ops.swizzled_quantize_groups, (3, 2))):
            real = op(x, 6, num_bits, symmetric, *more)
            meta = op(x.to("meta"), 6, num_bits, symmetric, *more)
            assert [(one.shape, one.dtype) for one in real] == [(one.shape, one.dtype) for one in meta]
            assert all(one.device.type == "meta" for one in meta)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_opcheck(ops, numbers, num_bits):
    x = numbers(42, dtype=torch.bfloat16)
    q, params = ops.quantize_groups(x, 6, num_bits, False)
    for operator, args in (
        (ops.quantize_groups, (x, 6, num_bits, True)),
        (ops.swizzled_quantize_groups, (x, 6, num_bits, True, 3, 2)),
        (ops.fake_quantize_groups, (x, 6, num_bits, False)),
        (ops.dequantize_groups, (q, params, 7, num_bits, torch.float16)),
        (ops.dequantize_reduce, (torch.stack((q, q)), torch.stack((params, params)), 7, num_bits, True, torch.float32)),
    ):
        torch.library.opcheck(operator.default, args)


def test_the_fronts_call_these_operators(ops, numbers, monkeypatch):
    def round_trip(x):
        q, params = quantize(x, 4, 4, symmetric=False)
        total = dequantize_reduce(torch.stack((q, q)), torch.stack((params, params)), 4, shape=x.shape, mean=True)
        return fake_quantize(x, 4, 8) + dequantize(q, params, 4, shape=x.shape) - total

    x = numbers(8, 8)
    wanted = round_trip(x)
    monkeypatch.setattr(operators, "_namespace", lambda op, device_type: "ds_cuda" if op == "quantizer" else None)
    with torch.profiler.profile(acc_events=True) as profile:
        same(round_trip(x), wanted)
    names = {event.key for event in profile.key_averages()}
    called = {"quantize_groups", "dequantize_groups", "dequantize_reduce", "fake_quantize_groups"}
    assert {f"ds_cuda::{name}" for name in called} <= names
