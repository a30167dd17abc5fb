"""Layer norm and RMS norm, alone and with the residual: the operators against the torch reference."""

import pytest
import torch
from deepspeed.ops import registry
from deepspeed.ops.transformer import layer_norm, layer_norm_residual, rms_norm, rms_norm_residual
from deepspeed.ops.transformer.norm import layer_norm_reference, rms_norm_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# relative to 1 + |wanted|: fp32 sums of a long row in another order, or one rounding on the other side of a tie
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="module")
def ops():
    return registry.require("transformer_inference")


def misaligned(*shape, dtype=torch.float32, seed=0, shift=0.0):
    """Random numbers that begin one element into their storage."""
    numel = torch.Size(shape).numel()
    numbers = torch.randn(numel + 1, generator=torch.Generator().manual_seed(seed)) * 2 + shift
    return numbers.to(dtype)[1:].view(shape)


def close(found, wanted):
    assert found.dtype == wanted.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("cols", [0, 1, 7, 1023, 65537])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(ops, rows, cols, dtype):
    x, residual = misaligned(rows, cols, dtype=dtype, shift=1.0), misaligned(rows, cols, dtype=dtype, seed=1)
    for weight_dtype in (dtype, torch.float32):
        weight, bias = misaligned(cols, dtype=weight_dtype, seed=2), misaligned(cols, dtype=weight_dtype, seed=3)
        for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
            close(ops.layer_norm(x, w, b, 1e-5), layer_norm_reference(x, w, b, 1e-5))
            out, total = ops.layer_norm_residual(x, residual, w, b, 1e-5)
            assert torch.equal(total, x + residual)
            close(out, layer_norm_reference(total, w, b, 1e-5))
        for w in (weight, None):
            close(ops.rms_norm(x, w, 1e-6), rms_norm_reference(x, w, 1e-6))
            out, total = ops.rms_norm_residual(x, residual, w, 1e-6)
            assert torch.equal(total, x + residual)
            close(out, rms_norm_reference(total, w, 1e-6))


def test_a_row_far_from_zero_keeps_its_variance(ops):
    """The mean is subtracted before squaring: no cancellation."""
    x = misaligned(4, 512) * 1e-2 + 1000
    wanted = torch.nn.functional.layer_norm(x.double(), (512,)).float()
    torch.testing.assert_close(ops.layer_norm(x, None, None, 1e-5), wanted, rtol=1e-2, atol=1e-2)


def test_nan_and_inf_stay_in_their_row(ops):
    x = misaligned(3, 40)
    x[1, 7], x[2, 39] = float("nan"), float("inf")
    for found, wanted in (
        (ops.layer_norm(x, None, None, 1e-5), layer_norm_reference(x, None, None, 1e-5)),
        (ops.rms_norm(x, None, 1e-5), rms_norm_reference(x, None, 1e-5)),
    ):
        assert found[0].isfinite().all()
        assert torch.equal(found.isnan(), wanted.isnan())


def test_accepts_non_contiguous_tensors(ops):
    base = misaligned(6, 8, 10)
    weight, bias = misaligned(20)[::2], misaligned(20, seed=1)[1::2]
    for x in (base.transpose(0, 1), base[::2], base[:, :1].expand(6, 8, 10), misaligned(6, 20)[:, ::2]):
        residual = torch.flip(x, (0,))
        close(ops.layer_norm(x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5))
        out, total = ops.rms_norm_residual(x, residual.mT.contiguous().mT, weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert out.is_contiguous()


def test_refuses_by_name(ops):
    x, weight = torch.ones(2, 5), torch.ones(5)

    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=f"{op}: {match}"):
            getattr(ops, op)(*args)

    for op, args in (("layer_norm", (None, None, 1e-5)), ("rms_norm", (None, 1e-5))):
        refused("x: found dtype float64", op, x.double(), *args)
        refused("x: found a sparse tensor", op, x.to_sparse(), *args)
        refused("x: found a tensor without dimensions", op, torch.tensor(1.0), *args)
        refused(r"weight: found shape \(4\)", op, x, torch.ones(4), *args[1:])
        refused(r"weight: found shape \(1, 5\)", op, x, torch.ones(1, 5), *args[1:])
        refused("weight: found dtype int64", op, x, torch.ones(5, dtype=torch.int64), *args[1:])
        refused("weight: found a tensor on meta", op, x, weight.to("meta"), *args[1:])
        refused(r"residual: found shape \(5, 2\)", f"{op}_residual", x, x.t(), *args)
        refused("residual: found dtype bfloat16", f"{op}_residual", x, x.bfloat16(), *args)
        refused("residual: found a tensor on meta", f"{op}_residual", x, x.to("meta"), *args)
    refused(r"bias: found shape \(6\)", "layer_norm", x, None, torch.ones(6), 1e-5)


def test_opcheck(ops):
    x, weight, bias = misaligned(3, 17, dtype=torch.bfloat16), misaligned(17), misaligned(17, dtype=torch.bfloat16)
    for operator, args in (
        (ops.layer_norm, (x, weight, bias, 1e-5)),
        (ops.layer_norm, (x.t(), None, None, 1e-5)),
        (ops.layer_norm_residual, (x, x.flip(0), weight, None, 1e-5)),
        (ops.rms_norm, (x, weight, 1e-5)),
        (ops.rms_norm_residual, (x, x.flip(0), None, 1e-5)),
    ):
        torch.library.opcheck(operator.default, args)


def test_the_fronts_run_these_operators_and_compile(ops, monkeypatch):
    def block(x, residual, weight, bias):
        x, residual = layer_norm_residual(x, residual, weight, bias)
        x, residual = rms_norm_residual(x, residual, weight)
        return rms_norm(layer_norm(x, weight, bias), weight) + residual

    arguments = misaligned(4, 33), misaligned(4, 33, seed=1), misaligned(33), misaligned(33, seed=2)
    with torch.profiler.profile(acc_events=True) as profile:
        found = block(*arguments)
    names = {event.key for event in profile.key_averages()}
    assert {f"ds_cpu::{name}" for name in ("layer_norm", "rms_norm", "layer_norm_residual")} <= names
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(*arguments), found)
    monkeypatch.setenv("DS_OPS_DISABLE", "transformer_inference")
    close(found, block(*arguments))


def test_layer_norm_of_much_fp32_is_torchs_own(ops):
    """Torch is at the memory's limit there; see the front."""
    for dtype, is_ours in ((torch.float32, False), (torch.bfloat16, True)):
        x = torch.ones(513, 1024, dtype=dtype)
        with torch.profiler.profile(acc_events=True) as profile:
            layer_norm(x)
            layer_norm_residual(x, x)
        names = {event.key for event in profile.key_averages()}
        assert ("ds_cpu::layer_norm" in names) == ("ds_cpu::layer_norm_residual" in names) == is_ours


def test_a_front_whose_input_wants_a_gradient_gives_one():
    x = misaligned(3, 8).requires_grad_()
    layer_norm(x).square().sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not rms_norm(x).requires_grad
