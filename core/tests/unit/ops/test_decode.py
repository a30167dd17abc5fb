"""Linear layers of few rows, gated activations and attention over a cache: the torch references against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer import pack_weight
from deepspeed.ops.transformer import DecoderLayer, Linear, Norm, decode_attention, gated_activation, linear


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "inference_core_ops,ragged_device_ops")


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_linear_is_torchs():
    x, weight, bias = numbers(2, 3, 8), numbers(5, 8, seed=1), numbers(5, seed=2)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    with pytest.raises(RuntimeError):
        linear(x, weight.t())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation_is_torchs(name):
    both = numbers(3, 10)
    gate, up = both.chunk(2, -1)
    wanted = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none")
    torch.testing.assert_close(gated_activation(gate, up, name), wanted * up)
    assert gated_activation(gate.bfloat16(), up.bfloat16(), name).dtype == torch.bfloat16


def alone(q, keys, values, scale, bias, window, softcap):
    """torch's attention for one sequence, with the mask written out. keys: (kv_heads, tokens, D)."""
    heads, num_queries, _ = q.shape
    length = keys.shape[1]
    position = torch.arange(length - num_queries, length).view(-1, 1)
    seen = torch.arange(length) <= position
    if window is not None:
        seen &= torch.arange(length) > position - window
    mask = torch.zeros(heads, num_queries, length)
    if bias is not None:
        mask = bias.view(-1, 1, 1) * (torch.arange(length) - position)
    mask = mask.masked_fill(~seen, float("-inf"))
    group = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    if softcap is None:
        return F.scaled_dot_product_attention(q[None], keys[None], values[None], mask[None], scale=scale)[0]
    return (softcap * torch.tanh(scale * q @ keys.mT / softcap) + mask).softmax(-1) @ values


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("alibi", "window", "softcap"),
    [(False, None, None), (True, None, None), (False, 4, None), (True, 1, None), (False, None, 0.5), (True, 4, 0.5)],
)
def test_attention_equals_torchs_for_each_sequence(num_queries, kv_heads, alibi, window, softcap):
    lengths = torch.tensor([5, 12, 3])
    q, k, v = numbers(3, 6, num_queries, 8), numbers(3, kv_heads, 12, 8, seed=1), numbers(3, kv_heads, 12, 8, seed=2)
    slopes = torch.rand(6, generator=torch.Generator().manual_seed(3)) if alibi else None
    wanted = torch.stack(
        [alone(q[b], k[b, :, :n], v[b, :, :n], 0.3, slopes, window, softcap) for b, n in enumerate(lengths.tolist())]
    )
    for b, n in enumerate(lengths.tolist()):  # what lies behind the end is not read
        k[b, :, n:], v[b, :, n:] = float("nan"), float("nan")
    found = decode_attention(q, k, v, lengths, 0.3, None, slopes, window, softcap)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    # the same in blocks of 4 tokens, strewn over a larger cache
    table = torch.tensor([[7, 2, -1], [9, 0, 5], [3, -1, -1]], dtype=torch.int32)
    caches = [torch.full((10, 4, kv_heads, 8), float("nan")) for _ in range(2)]
    for cache, whole in zip(caches, (k, v), strict=True):
        for b in range(3):
            for index, block in enumerate(table[b].tolist()):
                if block >= 0:
                    cache[block] = whole[b, :, 4 * index : 4 * index + 4].transpose(0, 1)
    paged = decode_attention(q, *caches, lengths.int(), 0.3, table, slopes, window, softcap)
    torch.testing.assert_close(paged, wanted, rtol=1e-5, atol=1e-6)
    halves = decode_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), lengths, 0.3, None, slopes, window, softcap)
    torch.testing.assert_close(halves.float(), wanted, rtol=5e-2, atol=5e-2)


def test_refuses_by_name():
    q, cache, lengths = torch.ones(2, 6, 1, 8), torch.ones(2, 3, 12, 8), torch.tensor([4, 5])
    blocks, table = torch.ones(4, 4, 3, 8), torch.zeros(2, 2, dtype=torch.int32)
    for match, call in (
        ("activation: found 'relu', but it must be one of silu", lambda: gated_activation(q, q, "relu")),
        ("gate: found dtype torch.int64", lambda: gated_activation(lengths, lengths)),
        (r"up: found torch.float32 of shape \(2, 3, 12, 8\)", lambda: gated_activation(q, cache)),
        (r"q: found torch.float32 of shape \(6, 1, 8\)", lambda: decode_attention(q[0], cache, cache, lengths, 1.0)),
        (
            r"k_cache: found .* \(2, 4, 12, 8\).*divide 6",
            lambda: decode_attention(q, torch.ones(2, 4, 12, 8), cache, lengths, 1.0),
        ),
        ("v_cache: found torch.bfloat16", lambda: decode_attention(q, cache, cache.bfloat16(), lengths, 1.0)),
        (r"k_cache: .*\(B, kv_heads", lambda: decode_attention(q, cache[:1], cache[:1], lengths, 1.0)),
        ("lengths: found torch.float32", lambda: decode_attention(q, cache, cache, lengths.float(), 1.0)),
        (
            r"lengths\[1\]: found 13, but it must be from 1, the new tokens, to 12",
            lambda: decode_attention(q, cache, cache, lengths + 8, 1.0),
        ),
        (r"lengths\[0\]: found 0", lambda: decode_attention(q, cache, cache, lengths - 4, 1.0)),
        (r"lengths\[0\]: found 9, .* to 8", lambda: decode_attention(q, blocks, blocks, lengths + 5, 1.0, table)),
        (
            r"block_table: found torch.int32 of shape \(1, 2\)",
            lambda: decode_attention(q, blocks, blocks, lengths, 1.0, table[:1]),
        ),
        (
            r"block_table\[1\]: found \[4, 4\], but the cache has blocks 0 to 3",
            lambda: decode_attention(
                q, blocks, blocks, lengths, 1.0, table + torch.tensor([[0], [4]], dtype=torch.int32)
            ),
        ),
        (
            r"alibi_slopes: found torch.float32 of shape \(3,\)",
            lambda: decode_attention(q, cache, cache, lengths, 1.0, alibi_slopes=torch.ones(3)),
        ),
        ("softcap: found 0", lambda: decode_attention(q, cache, cache, lengths, 1.0, softcap=0.0)),
        ("window: found 0", lambda: decode_attention(q, cache, cache, lengths, 1.0, window=0)),
    ):
        with pytest.raises(ConfigError, match=match):
            call()


def test_a_decoder_layer_says_what_does_not_fit():
    norm, weights = Norm(numbers(8)), Linear(numbers(8, 8))
    numbers_of = {"heads": 1, "kv_heads": 1, "head_dim": 8, "eps": 1e-6, "scale": 1.0}
    good = {"qkv": weights, "out": weights, "up": weights, "down": weights, "norm_attention": norm, "norm_mlp": norm}
    DecoderLayer(**good, **numbers_of)
    for match, wrong in (
        ("activation: found 'relu', but it must be one of silu, gelu, gelu_tanh", {"activation": "relu"}),
        ("norm_mlp: found None", {"norm_mlp": None}),
        ("norm_query, norm_key: found one", {"norm_query": norm}),
        ("norms: found a bias, but an RMS norm has none", {"norm_attention": Norm(norm.weight, norm.weight)}),
        (
            r"found weights of \[4, 8\] bits",
            {"up": Linear(pack_weight(numbers(8, 8), 4)), "out": Linear(pack_weight(numbers(8, 8), 8))},
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            DecoderLayer(**{**good, **wrong}, **numbers_of)
