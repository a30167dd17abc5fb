"""Norms, gelu, rotary embedding, softmax and fused additions against their torch references."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed.ops import operators
from deepspeed.ops import transformer as fronts
from deepspeed.ops.transformer import norm
from deepspeed.ops.transformer.norm import layer_norm_reference, rms_norm_reference
from deepspeed.ops.transformer.rotary import apply_rotary_reference, rotary_table
from ds_ext_cuda.op_builder.inference import InferenceBuilder

FORMS = {False: "none", True: "tanh"}
# relative to 1 + |wanted|: fp32 sums of a long row in another order, or one rounding on the other side of a tie
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="module")
def ops(load_op):
    return load_op(InferenceBuilder)


def close(found, wanted):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def refuser(ops):
    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=f"ds_cuda::{op}: {match}"):
            getattr(ops, op)(*args)

    return refused


# ----- norms ---------------------------------------------------------------------------------------------------------


def check_norms(ops, x, residual, weight, bias):
    total = x + residual
    close(ops.layer_norm(x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5))
    close(ops.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    out, found = ops.layer_norm_residual(x, residual, weight, bias, 1e-5)
    assert torch.equal(found, total)
    close(out, layer_norm_reference(total, weight, bias, 1e-5))
    out, found = ops.rms_norm_residual(x, residual, weight, 1e-6)
    assert torch.equal(found, total)
    close(out, rms_norm_reference(total, weight, 1e-6))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_norms_equal_the_reference(ops, numbers, rows, numel, dtype):
    for offset in (1, 0):  # misaligned, aligned
        x = numbers(rows, numel, dtype=dtype, shift=1.0, offset=offset)
        residual = numbers(rows, numel, dtype=dtype, seed=1, offset=offset)
        weight = numbers(numel, dtype=dtype, seed=2, offset=offset)
        bias = numbers(numel, seed=3, offset=offset)
        check_norms(ops, x, residual, weight, bias)
        check_norms(ops, x, residual, None, None)


# columns that fall to part of a warp, a warp, blocks of several sizes, and to the path that reads a row again
@pytest.mark.parametrize("cols", [8, 256, 512, 520, 1024, 1032, 4096, 16384, 32776])
def test_norms_equal_the_reference_on_every_path(ops, numbers, cols, dtype):
    x, residual = (numbers(9, cols, dtype=dtype, seed=seed, offset=0) for seed in (0, 1))
    weight, bias = numbers(cols, seed=2, offset=0), numbers(cols, dtype=dtype, seed=3, offset=0)
    check_norms(ops, x, residual, weight, bias)
    check_norms(ops, x[:2], residual[:2], weight, None)
    check_norms(ops, x[:2], residual[:2], None, bias)


@pytest.mark.parametrize("accesses", [129, 512])
def test_many_long_rows_are_taken_by_a_warp_each(ops, numbers, dtype, accesses):
    cols = accesses * 16 // dtype.itemsize
    x = numbers(1025, cols, dtype=dtype, shift=3.0, offset=0)
    weight, bias = (numbers(cols, dtype=dtype, seed=seed, offset=0) for seed in (1, 2))
    close(ops.layer_norm(x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5))
    close(ops.layer_norm(x, weight, None, 1e-5), layer_norm_reference(x, weight, None, 1e-5))
    close(ops.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def test_one_misaligned_argument_is_enough_for_narrow_access(ops, numbers):
    aligned = [numbers(2, 64, offset=0), numbers(2, 64, seed=1, offset=0), numbers(64, offset=0), numbers(64, offset=0)]
    for index, one in enumerate(aligned):
        given = list(aligned)
        given[index] = torch.cat((one.new_zeros(1), one.flatten()))[1:].view(one.shape)
        check_norms(ops, *given)


def test_a_row_far_from_zero_keeps_its_variance(ops, numbers):
    """The mean is subtracted before squaring: no cancellation."""
    x = numbers(4, 512, scale=2e-2, shift=1000.0)
    wanted = F.layer_norm(x.double(), (512,)).float()
    torch.testing.assert_close(ops.layer_norm(x, None, None, 1e-5), wanted, rtol=1e-2, atol=1e-2)


def test_nan_and_inf_stay_in_their_row(ops, numbers):
    x = numbers(3, 40)
    x[1, 7], x[2, 39] = float("nan"), float("inf")
    for found, wanted in (
        (ops.layer_norm(x, None, None, 1e-5), layer_norm_reference(x, None, None, 1e-5)),
        (ops.rms_norm(x, None, 1e-5), rms_norm_reference(x, None, 1e-5)),
    ):
        assert found[0].isfinite().all()
        assert torch.equal(found.isnan(), wanted.isnan())


def test_norms_accept_non_contiguous_tensors(ops, numbers):
    base = numbers(6, 8, 10)
    weight, bias = numbers(20)[::2], numbers(20, seed=1)[1::2]
    for x in (base.transpose(0, 1), base[::2], base[:, :1].expand(6, 8, 10), numbers(6, 20)[:, ::2]):
        check_norms(ops, x, torch.flip(x, (0,)).mT.contiguous().mT, weight, bias)
        assert ops.rms_norm(x, weight, 1e-6).is_contiguous()


def test_norms_refuse_by_name(ops, device):
    x, weight, refused = torch.ones(2, 5, device=device), torch.ones(5, device=device), refuser(ops)
    for op, args in (("layer_norm", (None, None, 1e-5)), ("rms_norm", (None, 1e-5))):
        refused("x: found dtype float64", op, x.double(), *args)
        refused("x: found a tensor without dimensions", op, torch.tensor(1.0, device=device), *args)
        refused(r"weight: found shape \(4\), but it must be \(5\)", op, x, weight[:4], *args[1:])
        refused(r"weight: found shape \(1, 5\)", op, x, weight[None], *args[1:])
        refused("weight: found dtype int64", op, x, weight.long(), *args[1:])
        refused("weight: found a tensor on meta", op, x, weight.to("meta"), *args[1:])
        refused(r"residual: found shape \(5, 2\)", f"{op}_residual", x, x.t(), *args)
        refused("residual: found dtype bfloat16", f"{op}_residual", x, x.bfloat16(), *args)
        refused("residual: found a tensor on meta", f"{op}_residual", x, x.to("meta"), *args)
    refused(r"bias: found shape \(6\)", "layer_norm", x, None, torch.ones(6, device=device), 1e-5)


# ----- element by element --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tanh", FORMS)
def test_gelu_equals_the_reference(ops, numbers, numel, dtype, tanh):
    for offset in (1, 0):
        x = numbers(numel, dtype=dtype, scale=3.0, offset=offset)
        close(ops.gelu(x, tanh), F.gelu(x.double(), approximate=FORMS[tanh]).to(dtype))
        for bias_dtype in (dtype, torch.float32):
            rows, bias = x.expand(3, numel), numbers(numel, dtype=bias_dtype, seed=1, offset=offset)
            total = (rows.float() + bias.float()).double()
            close(ops.bias_gelu(rows, bias, tanh), F.gelu(total, approximate=FORMS[tanh]).to(dtype))


@pytest.mark.parametrize("tanh", FORMS)
def test_gelu_of_the_ends(ops, device, dtype, tanh):
    largest = torch.finfo(dtype).max
    ends = torch.tensor([largest, -largest, 1e4, -1e4, 0.0, -0.0] * 11, dtype=dtype, device=device)
    assert torch.equal(ops.gelu(ends, tanh), ends.clamp_min(0))
    special = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype, device=device)
    found = ops.gelu(special, tanh)
    assert found.isnan().tolist() == [True, False, True]  # -inf * 0, as torch's
    assert found[1] == float("inf")


def test_additions_are_rounded_once(ops, numbers, numel, dtype):
    for offset in (1, 0):
        x, residual = (numbers(3, numel, dtype=dtype, seed=seed, offset=offset) for seed in (0, 1))
        for bias in (None, numbers(numel, dtype=dtype, seed=2, offset=offset), numbers(numel, seed=3, offset=offset)):
            wide = x.float() if bias is None else x.float() + bias.float()
            assert torch.equal(ops.bias_residual_add(x, bias, residual), (wide + residual.float()).to(dtype))


def test_elementwise_operators_accept_non_contiguous_tensors(ops, numbers):
    base, bias = numbers(6, 8, 10), numbers(20)[::2]
    for x in (base.transpose(0, 1), base[::2], base[:, :1].expand(6, 8, 10)):
        close(ops.gelu(x, False), F.gelu(x))
        close(ops.bias_gelu(x, bias, True), F.gelu(x + bias, approximate="tanh"))
        close(ops.bias_residual_add(x, bias, x.flip(0).mT.contiguous().mT), x + bias + x.flip(0))
        assert ops.gelu(x, True).is_contiguous()


def test_elementwise_operators_refuse_by_name(ops, device):
    x, bias, refused = torch.ones(2, 5, device=device), torch.ones(5, device=device), refuser(ops)
    for op, args in (("gelu", (False,)), ("bias_gelu", (bias, False)), ("bias_residual_add", (bias, x))):
        refused("x: found dtype float64", op, x.double(), *args)
    for op, more in (("bias_gelu", (False,)), ("bias_residual_add", (x,))):
        refused(r"bias: found shape \(4\), but it must be \(5\), the last dimension of x", op, x, bias[:4], *more)
        refused("bias: found dtype int32", op, x, bias.int(), *more)
        refused("bias: found a tensor on meta", op, x, bias.to("meta"), *more)
        refused("x: found a tensor without dimensions", op, torch.tensor(1.0, device=device), bias[:1], *more)
    refused(r"residual: found shape \(5\)", "bias_residual_add", x, None, bias)
    refused("residual: found dtype float16", "bias_residual_add", x, None, x.half())


# ----- rotary --------------------------------------------------------------------------------------------------------


def table(shape, seq_dim, rotary_dim, per_batch, device):
    positions = torch.arange(shape[seq_dim]) * 5
    if per_batch:
        positions = torch.stack([positions + 3 * row for row in range(shape[0])]).view(shape[0], shape[seq_dim])
    return tuple(one.to(device) for one in rotary_table(positions, rotary_dim))


@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 64), (1, 7, 2, 80), (2, 3, 1, 7), (3, 0, 2, 8), (1, 1, 1, 2), (1, 1023, 1, 64)], ids=str
)
@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize("per_batch", [False, True])
def test_rotary_equals_the_reference(ops, numbers, device, shape, dtype, seq_dim, per_batch):
    for offset in (1, 0):
        x = numbers(*shape, dtype=dtype, offset=offset)
        for rotary_dim in {2, 6, 34, 64, shape[-1] // 2 * 2}:
            if rotary_dim > shape[-1]:
                continue
            cos, sin = table(shape, seq_dim, rotary_dim, per_batch, device)
            for interleaved in (False, True):
                found = ops.rotary(x, cos, sin, interleaved, seq_dim)
                wanted = apply_rotary_reference(x, cos, sin, interleaved, seq_dim)
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_rotary_accepts_non_contiguous_tensors(ops, numbers, device):
    heads_first = numbers(2, 3, 5, 16).transpose(1, 2)
    cos, sin = table((2, 5, 3, 16), 1, 16, False, device)
    wide = torch.zeros(5, 16, device=device)
    wide[:, ::2] = cos
    found = ops.rotary(heads_first, wide[:, ::2], sin.t().contiguous().t(), True, 1)
    assert torch.equal(found, apply_rotary_reference(heads_first, cos, sin, True, 1))
    assert found.is_contiguous()


def test_rotary_refuses_by_name(ops, device):
    x, refused = torch.ones(2, 5, 3, 8, device=device), refuser(ops)
    cos, sin = table(x.shape, 1, 8, False, device)
    refused("x: found dtype int64", "rotary", x.long(), cos, sin, False, 1)
    refused(r"x: found shape \(5, 3, 8\)", "rotary", x[0], cos, sin, False, 1)
    refused("seq_dim: found 3, but it must be 1 or 2", "rotary", x, cos, sin, False, 3)
    refused(r"cos: found shape \(4, 4\)", "rotary", x, cos[:4], sin, False, 1)
    refused(r"cos: found shape \(5, 4\)", "rotary", x, cos, sin, False, 2)
    refused("cos: found dtype bfloat16", "rotary", x, cos.bfloat16(), sin, False, 1)
    refused(r"sin: found shape \(5, 2\)", "rotary", x, cos, sin[:, :2], False, 1)
    refused(r"cos: found shape \(5, 5\)", "rotary", x, *table(x.shape, 1, 10, False, device), False, 1)
    refused(r"cos: found shape \(3, 5, 4\)", "rotary", x, cos.expand(3, 5, 4), sin.expand(3, 5, 4), False, 1)
    refused("sin: found a tensor on meta", "rotary", x, cos, sin.to("meta"), False, 1)


# ----- softmax -------------------------------------------------------------------------------------------------------


def softmax_reference(x, mask, scale):
    scores = x.float() * scale
    return torch.softmax(scores if mask is None else scores + mask.float(), -1).to(x.dtype)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_softmax_equals_the_reference(ops, numbers, rows, numel, dtype):
    for offset in (1, 0):
        x = numbers(rows, numel, dtype=dtype, offset=offset)
        for mask in (None, numbers(rows, numel, dtype=dtype, seed=1, offset=offset), numbers(1, numel, offset=offset)):
            close(ops.masked_softmax(x, mask, 0.5), softmax_reference(x, mask, 0.5))


@pytest.mark.parametrize("cols", [8, 64, 520, 1032, 16384, 32776])
def test_softmax_equals_the_reference_on_every_path(ops, numbers, cols, dtype):
    x, mask = numbers(9, cols, dtype=dtype, scale=30.0, offset=0), numbers(9, cols, seed=1, scale=9.0, offset=0)
    close(ops.masked_softmax(x, mask, 0.125), softmax_reference(x, mask, 0.125))


@pytest.mark.parametrize("sizes", [(2, 3, 5, 16), (1, 3, 5, 16), (2, 1, 1, 16), (1, 1, 5, 16), (1, 1, 1, 16)], ids=str)
def test_a_mask_repeats_over_dimensions_of_size_1(ops, numbers, sizes, dtype):
    x = numbers(2, 3, 5, 16, dtype=dtype)
    mask = torch.where(numbers(*sizes, seed=1) > 0, 0.0, -float("inf"))
    mask[..., 0] = 0  # each row keeps one
    close(ops.masked_softmax(x, mask, 1.0), softmax_reference(x, mask, 1.0))
    close(ops.masked_softmax(x[0], mask[0], 1.0), softmax_reference(x[0], mask[0], 1.0))
    close(ops.masked_softmax(x.mT.contiguous().mT, mask.mT.contiguous().mT, 1.0), softmax_reference(x, mask, 1.0))


def test_softmax_of_large_small_and_masked_scores(ops, device):
    inf = float("inf")
    x = torch.tensor(
        [[1e4, 0.0, -1e4], [-3e38, -3e38, -3e38], [-inf, 0.0, -inf], [float("nan"), 0.0, 1.0]], device=device
    )
    close(ops.masked_softmax(x, None, 1.0), torch.softmax(x, -1))
    nothing_left = ops.masked_softmax(torch.zeros(1, 3, device=device), torch.full((1, 3), -inf, device=device), 1.0)
    assert nothing_left.isnan().all()


def test_softmax_refuses_by_name(ops, device):
    x, refused = torch.ones(2, 3, 4, device=device), refuser(ops)
    refused("x: found dtype float64", "masked_softmax", x.double(), None, 1.0)
    refused("x: found a tensor without dimensions", "masked_softmax", x[0, 0, 0], None, 1.0)
    refused(r"x: found shape \(1, 1, 2, 3, 4\)", "masked_softmax", x[None, None], None, 1.0)
    refused("mask: found dtype bool", "masked_softmax", x, x > 0, 1.0)
    refused(r"mask: found shape \(3, 4\)", "masked_softmax", x, x[0], 1.0)
    refused(r"mask: found shape \(2, 3, 1\)", "masked_softmax", x, x[..., :1], 1.0)
    refused(r"mask: found shape \(2, 2, 4\)", "masked_softmax", x, x[:, :2], 1.0)
    refused("mask: found a tensor on meta", "masked_softmax", x, x.to("meta"), 1.0)


# ----- all of them ---------------------------------------------------------------------------------------------------


def test_opcheck(ops, numbers, device):
    x, weight, bias = numbers(3, 17, dtype=torch.bfloat16), numbers(17), numbers(17, dtype=torch.bfloat16)
    heads = numbers(2, 5, 3, 10, dtype=torch.bfloat16)
    for operator, args in (
        (ops.layer_norm, (x, weight, bias, 1e-5)),
        (ops.layer_norm, (x.t(), None, None, 1e-5)),
        (ops.layer_norm_residual, (x, x.flip(0), weight, None, 1e-5)),
        (ops.rms_norm, (x, weight, 1e-6)),
        (ops.rms_norm_residual, (x, x.flip(0), None, 1e-6)),
        (ops.gelu, (x.t(), False)),
        (ops.bias_gelu, (x, bias, True)),
        (ops.bias_residual_add, (x, None, x.flip(0))),
        (ops.rotary, (heads, *table(heads.shape, 1, 8, False, device), True, 1)),
        (ops.masked_softmax, (x, x[:1], 0.5)),
    ):
        torch.library.opcheck(operator.default, args)


def test_the_fronts_call_these_operators(ops, numbers, device, monkeypatch):
    def block(x, residual, weight, bias, heads, cos, sin):
        x, residual = fronts.layer_norm_residual(x, residual, weight, bias)
        x, residual = fronts.rms_norm_residual(fronts.bias_gelu(x, bias), residual, weight)
        x = fronts.rms_norm(fronts.layer_norm(fronts.gelu(x, "tanh"), weight, bias), weight)
        return x + residual, fronts.apply_rotary(heads, cos, sin, interleaved=True)

    heads = numbers(2, 5, 3, 16)
    arguments = (
        *(numbers(4, 33), numbers(4, 33, seed=1), numbers(33), numbers(33, seed=2)),
        *(heads, *table(heads.shape, 1, 8, False, device)),
    )
    wanted = block(*arguments)
    monkeypatch.setattr(operators, "_namespace", lambda op, _: "ds_cuda" if op == "transformer_inference" else None)
    with torch.profiler.profile(acc_events=True) as profile:
        for found, one in zip(block(*arguments), wanted, strict=True):
            close(found, one)
    names = {event.key for event in profile.key_averages()}
    called = ["layer_norm", "layer_norm_residual", "rms_norm", "rms_norm_residual", "gelu", "bias_gelu", "rotary"]
    assert {f"ds_cuda::{name}" for name in called} <= names


def test_much_fp32_is_left_to_torch_on_the_host_only():
    """The front's choice was measured on the host; a device's kernel serves every size."""
    assert norm._bound_by_memory(torch.empty(1 << 19))
    assert not norm._bound_by_memory(torch.empty(1 << 19, device="meta"))
