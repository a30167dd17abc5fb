"""The quantizer's operators against the torch reference: the same bits, for every dtype, size and layout."""

import pytest
import torch
from deepspeed.ops import registry
from deepspeed.ops.quantizer import dequantize, dequantize_reduce, ds_quantizer, fake_quantize, quantize
from deepspeed.ops.quantizer import groups as reference
from deepspeed.ops.quantizer.groups import fake_quantize_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]


@pytest.fixture(scope="module")
def ops():
    return registry.require("quantizer")


def misaligned(numel, dtype, seed=0):
    """Random numbers that begin one element into their storage."""
    return (torch.randn(numel + 1, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)[1:]


def group_counts(numel):
    return sorted({1, max(numel, 1), *(count for count in (3, 7) if numel % count == 0)})


@pytest.mark.parametrize("count", [0, 1, 7, 1023, 65537, 131074])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_equals_the_reference(ops, count, dtype, num_bits, symmetric):
    x = misaligned(count, dtype)
    for num_groups in group_counts(count):
        q, params = ops.quantize_groups(x, num_groups, num_bits, symmetric)
        wanted_q, wanted_params = reference.quantize_reference(x, num_groups, num_bits, symmetric)
        torch.testing.assert_close(q, wanted_q, rtol=0, atol=0)
        torch.testing.assert_close(params, wanted_params, rtol=0, atol=0)
        fake = ops.fake_quantize_groups(x, num_groups, num_bits, symmetric)
        torch.testing.assert_close(fake, fake_quantize_reference(x, num_groups, num_bits, symmetric), rtol=0, atol=0)
        size = count // num_groups
        copies = torch.stack((q, q.flip(0), q)), torch.stack((params, params.flip(0) * 2, params))
        for out in DTYPES:
            torch.testing.assert_close(
                ops.dequantize_groups(q, params, size, num_bits, out),
                reference.dequantize_reference(q, params, size, num_bits, out),
                rtol=0,
                atol=0,
            )
            for mean in (True, False):
                torch.testing.assert_close(
                    ops.dequantize_reduce(*copies, size, num_bits, mean, out),
                    reference.dequantize_reduce_reference(*copies, size, num_bits, mean, out),
                    rtol=0,
                    atol=0,
                )


@pytest.mark.parametrize("num_bits", [2, 3, 5, 12, 16])
def test_fake_quantization_equals_the_reference_at_every_width(ops, num_bits):
    x = misaligned(1024, torch.float32)
    for symmetric in (True, False):
        wanted = fake_quantize_reference(x, 4, num_bits, symmetric)
        assert torch.equal(ops.fake_quantize_groups(x, 4, num_bits, symmetric), wanted)


@pytest.mark.parametrize("value", [0.0, -0.0, 5.0, 1e-45, -3e38, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("num_bits", "symmetric"), FORMS)
def test_special_groups_equal_the_reference(ops, value, num_bits, symmetric):
    for others in (value, 1.0):
        x = torch.full((2, 37), others)
        x[1, 5] = value
        x[0] = torch.linspace(-1, 1, 37)
        found = ops.quantize_groups(x, 2, num_bits, symmetric)
        for one, wanted in zip(found, reference.quantize_reference(x, 2, num_bits, symmetric), strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=0, equal_nan=True)
        back = ops.dequantize_groups(*found, 37, num_bits, torch.float32)
        assert back[0].isfinite().all()
        assert back[1].isnan().all() if not torch.tensor(value).isfinite() else back[1].isfinite().all()


def test_accepts_non_contiguous_tensors(ops):
    x = misaligned(60, torch.bfloat16).view(6, 10)
    for one in (x.t(), x[:, ::2], x.expand(2, 6, 10)):
        for found, wanted in zip(
            ops.quantize_groups(one, 2, 4, False), reference.quantize_reference(one, 2, 4, False), strict=True
        ):
            assert torch.equal(found, wanted)
        fake = ops.fake_quantize_groups(one, 2, 8, True)
        assert torch.equal(fake, fake_quantize_reference(one, 2, 8, True))
        assert fake.is_contiguous()
    q, params = quantize(x, 6, 8, False)
    wide = torch.zeros(6, 4)
    wide[:, 1::2] = params
    assert torch.equal(
        ops.dequantize_groups(q.t().contiguous().t(), wide[:, 1::2], 10, 8, torch.float32), dequantize(q, params)
    )


def test_refuses_by_name(ops):
    x = torch.ones(8)
    q, params = ops.quantize_groups(x, 2, 8, True)

    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=match):
            getattr(ops, op)(*args)

    for op in ("quantize_groups", "fake_quantize_groups"):
        refused("x: found dtype int64", op, torch.arange(8), 2, 8, True)
        refused("x: found a sparse tensor", op, torch.eye(4).to_sparse(), 2, 8, True)
        refused("num_groups: found 3, but it must be a divisor of the 8 elements of x", op, x, 3, 8, True)
        refused("num_groups: found 0", op, x, 0, 8, True)
        refused("num_bits: found 1", op, x, 2, 1, True)
    refused("num_bits: found 5, but it must be 8 or 4", "quantize_groups", x, 2, 5, True)
    for op, dims in (("dequantize_groups", ()), ("dequantize_reduce", (1,))):
        mean = () if op == "dequantize_groups" else (True,)
        good_q, good_params = q.reshape(*dims, 2, 4), params.reshape(*dims, 2, 1)
        refused("q: found dtype float32", op, good_q.float(), good_params, 4, 8, *mean, torch.float32)
        refused("params: found dtype bfloat16", op, good_q, good_params.bfloat16(), 4, 8, *mean, torch.float32)
        refused(r"q: found shape \(8\)", op, q.flatten(), good_params, 4, 8, *mean, torch.float32)
        refused(r"params: found shape \(.*3, 1\)", op, good_q, torch.ones(*dims, 3, 1), 4, 8, *mean, torch.float32)
        refused("group_size: found 5, but it must be what 4 bytes", op, good_q, good_params, 5, 8, *mean, torch.float32)
        refused("dtype: found another dtype", op, good_q, good_params, 4, 8, *mean, torch.float64)
        refused("params: found a tensor on meta", op, good_q, good_params.to("meta"), 4, 8, *mean, torch.float32)


def test_meta_tensors_give_the_shapes_of_real_ones(ops):
    x = torch.ones(6, 7)
    for num_bits, symmetric in FORMS:
        real = ops.quantize_groups(x, 6, num_bits, symmetric)
        meta = ops.quantize_groups(x.to("meta"), 6, num_bits, symmetric)
        assert [(one.shape, one.dtype) for one in real] == [(one.shape, one.dtype) for one in meta]
        assert all(one.device.type == "meta" for one in meta)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_opcheck(ops, num_bits):
    x = misaligned(42, torch.bfloat16)
    q, params = ops.quantize_groups(x, 6, num_bits, False)
    for operator, args in (
        (ops.quantize_groups, (x, 6, num_bits, True)),
        (ops.fake_quantize_groups, (x, 6, num_bits, False)),
        (ops.dequantize_groups, (q, params, 7, num_bits, torch.float16)),
        (ops.dequantize_reduce, (torch.stack((q, q)), torch.stack((params, params)), 7, num_bits, True, torch.float32)),
    ):
        torch.library.opcheck(operator.default, args)


def test_the_fronts_run_these_operators_and_compile(ops, monkeypatch):
    def round_trip(x):
        q, params = quantize(x, 4, 4, symmetric=False)
        total = dequantize_reduce(torch.stack((q, q)), torch.stack((params, params)), 4, shape=x.shape, mean=True)
        return ds_quantizer(x, 4, 8) + dequantize(q, params, 4, shape=x.shape) - total

    x = misaligned(64, torch.float32).view(8, 8)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x)
    with torch.profiler.profile(acc_events=True) as profile:
        found = round_trip(x)
    names = {event.key for event in profile.key_averages()}
    assert {"ds_cpu::quantize_groups", "ds_cpu::dequantize_groups", "ds_cpu::dequantize_reduce"} <= names
    monkeypatch.setenv("DS_OPS_DISABLE", "quantizer")
    assert torch.equal(found, round_trip(x))
    assert torch.equal(found, compiled)


def test_fronts_take_what_the_operators_do_not():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).requires_grad_()
    q, params = quantize(x, 3)
    assert not q.requires_grad
    assert (dequantize(q, params, shape=x.shape) - x.detach()).abs().max() <= params.max() / 2
    assert fake_quantize(x, 3, stochastic=True).dtype == torch.float64
