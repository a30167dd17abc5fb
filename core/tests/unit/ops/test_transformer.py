"""Norms, gelu and rotary: the torch references against torch's own functions and against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F
from deepspeed.errors import ConfigError
from deepspeed.ops.transformer import (
    apply_rotary,
    bias_gelu,
    gelu,
    layer_norm,
    layer_norm_residual,
    rms_norm,
    rms_norm_residual,
    rotary_table,
)


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "transformer_inference")


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_equal_torchs(dtype):
    x, residual, weight, bias = numbers(4, 9, dtype=dtype), numbers(4, 9, dtype=dtype, seed=1), numbers(9), numbers(9)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {}
    wide, total = x.float(), (x + residual).float()
    out = layer_norm(x, weight, bias, 1e-3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), F.layer_norm(wide, (9,), weight, bias, 1e-3), **tolerance)
    out, kept = layer_norm_residual(x, residual, weight)
    assert torch.equal(kept, x + residual)
    torch.testing.assert_close(out.float(), F.layer_norm(total, (9,), weight), **tolerance)
    torch.testing.assert_close(rms_norm(x, weight).float(), F.rms_norm(wide, (9,), weight, 1e-6), **tolerance)
    out, kept = rms_norm_residual(x, residual)
    assert torch.equal(kept, x + residual)
    torch.testing.assert_close(out.float(), F.rms_norm(total, (9,), eps=1e-6), **tolerance)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_equals_torchs(approximate):
    x, bias = numbers(4, 9), numbers(9, seed=1)
    assert torch.equal(gelu(x, approximate), F.gelu(x, approximate=approximate))
    assert torch.equal(bias_gelu(x, bias, approximate), F.gelu(x + bias, approximate=approximate))
    assert bias_gelu(x.bfloat16(), bias).dtype == torch.bfloat16


def test_rotary_turns_each_pair_by_its_angle():
    x = numbers(1, 3, 2, 6)
    cos, sin = rotary_table(torch.tensor([0, 1, 5]), 4, base=100.0)
    for interleaved in (False, True):
        found = apply_rotary(x, cos, sin, interleaved=interleaved)
        assert torch.equal(found[..., 4:], x[..., 4:])
        assert torch.equal(found[:, 0], x[:, 0])  # position 0 is not turned
        for index, position in enumerate((0, 1, 5)):
            for i, frequency in enumerate((1.0, 0.1)):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
                turn = complex(math.cos(position * frequency), math.sin(position * frequency))
                for head in range(2):
                    wanted = complex(x[0, index, head, a], x[0, index, head, b]) * turn
                    assert found[0, index, head, a].item() == pytest.approx(wanted.real, abs=1e-6)
                    assert found[0, index, head, b].item() == pytest.approx(wanted.imag, abs=1e-6)


def test_rotary_depends_on_the_distance_alone():
    q, k = numbers(1, 1, 1, 8), numbers(1, 1, 1, 8, seed=1)

    def product(first, second):
        turned = [apply_rotary(x, *rotary_table(torch.tensor([at]), 8)) for x, at in ((q, first), (k, second))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 10), product(103, 110), rtol=1e-4, atol=1e-4)


def test_rotary_with_heads_first_and_with_positions_per_row():
    x = numbers(2, 5, 3, 8)
    cos, sin = rotary_table(torch.arange(5), 8)
    heads_first = apply_rotary(x.transpose(1, 2), cos, sin, seq_dim=2).transpose(1, 2)
    assert torch.equal(heads_first, apply_rotary(x, cos, sin))
    positions = torch.stack((torch.arange(5), torch.arange(5) + 7))
    found = apply_rotary(x, *rotary_table(positions, 8), interleaved=True)
    for row in range(2):
        alone = apply_rotary(x[row : row + 1], *rotary_table(positions[row], 8), interleaved=True)
        assert torch.equal(found[row : row + 1], alone)


def test_gradients_come_from_the_reference():
    x, weight = numbers(3, 8).requires_grad_(), numbers(8).requires_grad_()
    apply_rotary(
        gelu(rms_norm(layer_norm(x, weight), weight)).view(1, 3, 1, 8), *rotary_table(torch.arange(3), 8)
    ).sum().backward()
    assert x.grad.isfinite().all()
    assert weight.grad.abs().max() > 0


def test_empty_tensors():
    for shape in ((0, 4), (3, 0)):
        x = torch.empty(shape)
        assert layer_norm(x).shape == rms_norm(x).shape == gelu(x).shape == shape


def test_refuses_by_name():
    x = torch.ones(2, 5)
    heads = torch.ones(2, 5, 3, 8)
    cos, sin = rotary_table(torch.arange(5), 8)
    for match, call in (
        (r"weight: found shape \(4,\), but it must be \(5,\)", lambda: layer_norm(x, torch.ones(4))),
        (r"bias: found shape \(4,\)", lambda: layer_norm(x, None, torch.ones(4))),
        (r"residual: found torch.float32 of shape \(5, 2\)", lambda: rms_norm_residual(x, x.t())),
        ("x: found torch.int64 of shape", lambda: rms_norm(x.long())),
        (r"x: found torch.float32 of shape \(\)", lambda: layer_norm(torch.tensor(1.0))),
        ("approximate: found 'sigmoid', but it must be one of none, tanh", lambda: gelu(x, "sigmoid")),
        (r"bias: found shape \(2,\)", lambda: bias_gelu(x, torch.ones(2))),
        ("x: found dtype torch.int64", lambda: gelu(x.long())),
        ("rotary_dim: found 7", lambda: rotary_table(torch.arange(5), 7)),
        (r"x: found torch.float32 of shape \(2, 5\)", lambda: apply_rotary(x, cos, sin)),
        ("seq_dim: found 3", lambda: apply_rotary(heads, cos, sin, seq_dim=3)),
        (
            r"cos: found torch.float32 of shape \(5, 4\), but for x of shape \(2, 5, 3, 8\) and seq_dim 2",
            lambda: apply_rotary(heads, cos, sin, seq_dim=2),
        ),
        (r"sin: found torch.bfloat16", lambda: apply_rotary(heads, cos, sin.bfloat16())),
    ):
        with pytest.raises(ConfigError, match=match):
            call()
