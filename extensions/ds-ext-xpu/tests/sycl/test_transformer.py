"""The kernels of a transformer's building blocks against the torch references of core."""

import importlib

import pytest
import torch

REFERENCES = ("norm", "activations", "rotary")
# modules, whose functions of the same name the package has in their place
norm, activations, rotary = (importlib.import_module(f"deepspeed.ops.transformer.{name}") for name in REFERENCES)


def rows(close, numel, dtype, count):
    return torch.stack([close.numbers(numel, dtype, seed=seed) for seed in range(count)])


# ----- norms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_norms_equal_the_reference(ops, close, numel, dtype, with_weights, num_rows):
    x, residual = rows(close, numel, dtype, num_rows), rows(close, numel, dtype, num_rows).flip(0)
    weight = close.numbers(numel, dtype, seed=8) if with_weights else None
    bias = close.numbers(numel, seed=9) if with_weights else None  # fp32 beside any x
    total = x + residual
    close.check(ops.layer_norm(x, weight, bias, 1e-5), norm.layer_norm_reference(x, weight, bias, 1e-5), atol=2e-6)
    close.check(ops.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6), atol=2e-6)
    out, found = ops.layer_norm_residual(x, residual, weight, bias, 1e-5)
    assert torch.equal(found, total)
    close.check(out, norm.layer_norm_reference(total, weight, bias, 1e-5), atol=2e-6)
    out, found = ops.rms_norm_residual(x, residual, weight, 1e-6)
    assert torch.equal(found, total)
    close.check(out, norm.rms_norm_reference(total, weight, 1e-6), atol=2e-6)


def test_many_short_rows(ops, close, dtype):
    """Three numbers may be nearly equal, which a small eps would make a division by nearly nothing."""
    x = close.numbers(65537 * 3, dtype).view(65537, 3)
    close.check(ops.layer_norm(x, None, None, 0.1), norm.layer_norm_reference(x, None, None, 0.1), atol=2e-6)


def test_a_row_far_from_zero_keeps_its_variance(ops, close):
    x = close.numbers(1023) + 1000.0
    close.check(ops.layer_norm(x, None, None, 1e-5), norm.layer_norm_reference(x, None, None, 1e-5), atol=2e-4)


def test_nan_stays_in_its_row(ops):
    x = torch.arange(12.0).view(3, 4)
    x[1, 2] = float("nan")
    for out in (ops.layer_norm(x, None, None, 1e-5), ops.rms_norm(x, None, 1e-6)):
        assert out.isnan().any(1).tolist() == [False, True, False]


# ----- gelu ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", activations.GELU_FORMS)
def test_gelu_equals_the_reference(ops, close, numel, dtype, form):
    x, bias = rows(close, numel, dtype, 3) * 3, close.numbers(numel, seed=9)
    # 1 + erf loses digits far below 0, there and here: of such numbers half precision shows it
    limits = {"atol": 2e-6, "share": 0.9}
    close.check(ops.gelu(x, form == "tanh"), activations.gelu_reference(x, form), **limits)
    close.check(ops.bias_gelu(x, bias, form == "tanh"), activations.bias_gelu_reference(x, bias, form), **limits)


@pytest.mark.parametrize("form", activations.GELU_FORMS)
def test_gelu_of_special_numbers(ops, form):
    x = torch.tensor([0.0, -0.0, 30.0, -30.0, float("inf"), float("nan")])
    wanted = torch.tensor([0.0, 0.0, 30.0, 0.0, float("inf"), float("nan")])
    torch.testing.assert_close(ops.gelu(x, form == "tanh"), wanted, rtol=0, atol=0, equal_nan=True)


# ----- rotary --------------------------------------------------------------------------------------------------------


def turn(ops, close, shape, rotary_dim, dtype, *, batched=False, seq_dim=1):
    x = close.numbers(torch.Size(shape).numel(), dtype).view(shape)
    positions = torch.arange(shape[seq_dim]) + (7 * torch.arange(shape[0])[:, None] if batched else 0)
    if rotary_dim:
        cos, sin = rotary.rotary_table(positions, rotary_dim)
    else:
        cos = sin = torch.zeros((*positions.shape, 0))
    for interleaved in (True, False):
        wanted = rotary.apply_rotary_reference(x, cos, sin, interleaved, seq_dim)
        assert torch.equal(ops.rotary(x, cos, sin, interleaved, seq_dim), wanted)


def test_rotary_equals_the_reference_bit_for_bit(ops, close, numel, dtype):
    turn(ops, close, (1, 3, 2, numel), numel - numel % 2, dtype)  # of the head
    turn(ops, close, (1, numel, 1, 10), 6, dtype)  # of the sequence, with elements that pass


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("shape", "seq_dim"), [((3, 5, 2, 8), 1), ((3, 2, 5, 8), 2)])
def test_rotary_of_every_layout(ops, close, dtype, shape, seq_dim, batched):
    for rotary_dim in (0, 2, 8):
        turn(ops, close, shape, rotary_dim, dtype, batched=batched, seq_dim=seq_dim)


# ----- all of them ---------------------------------------------------------------------------------------------------


def test_what_is_not_contiguous_is_read_in_order(ops, close):
    x = close.numbers(2 * 3 * 4 * 8).view(8, 4, 3, 2).permute(3, 2, 1, 0)
    same, weight = x.contiguous(), torch.stack((close.numbers(8), close.numbers(8)), -1)[:, 0]
    assert torch.equal(ops.layer_norm(x, weight, None, 1e-5), ops.layer_norm(same, weight.contiguous(), None, 1e-5))
    assert torch.equal(ops.gelu(x, True), ops.gelu(same, True))
    cos, sin = rotary.rotary_table(torch.arange(3), 8)
    assert torch.equal(ops.rotary(x, cos, sin, False, 1), ops.rotary(same, cos, sin, False, 1))


X, ROW = torch.zeros(2, 4), torch.zeros(4)
HEADS, TABLE = torch.zeros(2, 3, 1, 4), torch.zeros(3, 2)
REFUSALS = (
    (lambda ops: ops.layer_norm(X.double(), None, None, 1e-5), "layer_norm: x: found dtype float64"),
    (lambda ops: ops.layer_norm(torch.tensor(1.0), None, None, 1e-5), "x: found a tensor without dimensions"),
    (lambda ops: ops.layer_norm(X, torch.zeros(3), None, 1e-5), r"weight: found shape \(3\), but it must be \(4\)"),
    (lambda ops: ops.layer_norm(X, None, ROW.long(), 1e-5), "bias: found dtype int64"),
    (lambda ops: ops.rms_norm(X.to_sparse(), None, 1e-6), "x: found a sparse tensor"),
    (lambda ops: ops.rms_norm_residual(X, X[:1], None, 1e-6), r"residual: found shape \(1, 4\), but it must be"),
    (lambda ops: ops.rms_norm_residual(X, X.half(), None, 1e-6), "residual: found dtype float16, but it must be dtype"),
    (lambda ops: ops.bias_gelu(X, torch.zeros(2), True), r"bias: found shape \(2\)"),
    (lambda ops: ops.rotary(X, TABLE, TABLE, True, 1), r"x: found shape \(2, 4\), but it must be of 4 dimensions"),
    (lambda ops: ops.rotary(HEADS, TABLE, TABLE, True, 3), "seq_dim: found 3, but it must be 1 or 2"),
    (lambda ops: ops.rotary(HEADS, TABLE[:2], TABLE, True, 1), r"cos: found shape \(2, 2\)"),
    (lambda ops: ops.rotary(HEADS, TABLE.half(), TABLE, True, 1), "cos: found dtype float16"),
    (lambda ops: ops.rotary(HEADS, TABLE, TABLE[:, :1], True, 1), r"sin: found shape \(3, 1\), but it must be"),
)


@pytest.mark.parametrize(("call", "match"), REFUSALS, ids=[match for _, match in REFUSALS])
def test_a_wrong_argument_is_named(ops, call, match):
    with pytest.raises(RuntimeError, match=match):
        call(ops)
