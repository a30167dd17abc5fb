"""The rotary embedding's operator against the torch reference: the same bits."""

import pytest
import torch
from deepspeed.ops import registry
from deepspeed.ops.transformer import apply_rotary, rotary_table
from deepspeed.ops.transformer.rotary import apply_rotary_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def ops():
    return registry.require("transformer_inference")


def misaligned(*shape, dtype=torch.float32):
    """Random numbers that begin one element into their storage."""
    numel = torch.Size(shape).numel()
    return torch.randn(numel + 1, generator=torch.Generator().manual_seed(0)).to(dtype)[1:].view(shape)


def table(shape, seq_dim, rotary_dim, per_batch):
    positions = torch.arange(shape[seq_dim]) * 5
    if per_batch:
        positions = torch.stack([positions + 3 * row for row in range(shape[0])]).view(shape[0], shape[seq_dim])
    return rotary_table(positions, rotary_dim)


@pytest.mark.parametrize(
    "shape", [(2, 5, 3, 64), (1, 7, 2, 80), (2, 3, 1, 7), (3, 0, 2, 8), (0, 3, 2, 8), (1, 1023, 1, 64)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize("per_batch", [False, True])
def test_equals_the_reference(ops, shape, dtype, seq_dim, per_batch):
    if per_batch and shape[0] == 0:
        pytest.skip("no rows to tell apart")
    x = misaligned(*shape, dtype=dtype)
    for rotary_dim in {2, 6, 34, 64, shape[-1] // 2 * 2}:
        if rotary_dim > shape[-1]:
            continue
        cos, sin = table(shape, seq_dim, rotary_dim, per_batch)
        for interleaved in (False, True):
            found = ops.rotary(x, cos, sin, interleaved, seq_dim)
            wanted = apply_rotary_reference(x, cos, sin, interleaved, seq_dim)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_accepts_non_contiguous_tensors(ops):
    heads_first = misaligned(2, 3, 5, 16).transpose(1, 2)
    cos, sin = table((2, 5, 3, 16), 1, 16, False)
    wide = torch.zeros(5, 16)
    wide[:, ::2] = cos
    found = ops.rotary(heads_first, wide[:, ::2], sin.t().contiguous().t(), True, 1)
    assert torch.equal(found, apply_rotary_reference(heads_first, cos, sin, True, 1))
    assert found.is_contiguous()


def test_refuses_by_name(ops):
    x = torch.ones(2, 5, 3, 8)
    cos, sin = rotary_table(torch.arange(5), 8)

    def refused(match, *args):
        with pytest.raises(RuntimeError, match=f"rotary: {match}"):
            ops.rotary(*args)

    refused("x: found dtype int64", x.long(), cos, sin, False, 1)
    refused(r"x: found shape \(5, 3, 8\)", x[0], cos, sin, False, 1)
    refused("seq_dim: found 3, but it must be 1 or 2", x, cos, sin, False, 3)
    refused(r"cos: found shape \(4, 4\)", x, cos[:4], sin, False, 1)
    refused(r"cos: found shape \(5, 4\)", x, cos, sin, False, 2)
    refused("cos: found dtype bfloat16", x, cos.bfloat16(), sin, False, 1)
    refused(r"sin: found shape \(5, 2\)", x, cos, sin[:, :2], False, 1)
    refused(r"cos: found shape \(5, 5\)", x, *rotary_table(torch.arange(5), 10), False, 1)
    refused(r"cos: found shape \(3, 5, 4\)", x, cos.expand(3, 5, 4), sin.expand(3, 5, 4), False, 1)
    refused("sin: found a tensor on meta", x, cos, sin.to("meta"), False, 1)


def test_opcheck(ops):
    x = misaligned(2, 5, 3, 10, dtype=torch.bfloat16)
    torch.library.opcheck(ops.rotary.default, (x, *rotary_table(torch.arange(5), 8), True, 1))
    torch.library.opcheck(ops.rotary.default, (x, *rotary_table(torch.arange(3), 10), False, 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_front_runs_the_operator_and_compiles(ops, monkeypatch, interleaved):
    def turn(x, positions):
        return apply_rotary(x, *rotary_table(positions, 8), interleaved=interleaved)

    arguments = misaligned(2, 5, 3, 16), torch.arange(5)
    with torch.profiler.profile(acc_events=True) as profile:
        found = turn(*arguments)
    assert "ds_cpu::rotary" in {event.key for event in profile.key_averages()}
    assert torch.equal(torch.compile(turn, fullgraph=True, backend="aot_eager")(*arguments), found)
    monkeypatch.setenv("DS_OPS_DISABLE", "transformer_inference")
    assert torch.equal(found, turn(*arguments))
