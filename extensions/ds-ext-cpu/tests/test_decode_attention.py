"""Attention over a cache: the operator against the torch reference, whole and in blocks, and what it does not read."""

import pytest
import torch
from deepspeed.ops import registry
from deepspeed.ops.transformer import decode_attention
from deepspeed.ops.transformer.decode_attention import decode_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="module")
def ops():
    return registry.require("ragged_device_ops")


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_blocks(cache, lengths, block_size, seed=0):
    """The tokens of a whole cache in blocks of a larger one, in random order, nan everywhere else; and the table."""
    batch, kv_heads, tokens, head_dim = cache.shape
    per_sequence = -(-tokens // block_size)
    order = torch.randperm(batch * per_sequence + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * per_sequence].view(batch, per_sequence)
    blocks = torch.full((len(order), block_size, kv_heads, head_dim), float("nan"), dtype=cache.dtype)
    for row, length in enumerate(lengths.tolist()):
        for token in range(length):
            blocks[table[row, token // block_size], token % block_size] = cache[row, :, token]
    return blocks, table.int()


def close(found, wanted):
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("head_dim", [1, 20, 64, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 1)])
@pytest.mark.parametrize(("num_queries", "alibi", "window"), [(1, False, None), (3, True, None), (2, False, 70)])
def test_equals_the_reference(ops, dtype, head_dim, heads, kv_heads, num_queries, alibi, window):
    """Lengths around a tile of 64 tokens and a block; what lies behind a sequence's end is nan."""
    lengths = torch.tensor([3, 64, 131])
    q = numbers(3, heads, num_queries, head_dim, dtype=dtype) * 2
    caches = [numbers(3, kv_heads, 140, head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    for row, length in enumerate(lengths.tolist()):
        for cache in caches:
            cache[row, :, length:] = float("nan")
    slopes = torch.linspace(0.05, 0.5, heads) if alibi else None
    scale = head_dim**-0.5
    wanted = decode_attention_reference(q, *caches, lengths, scale, None, slopes, window)
    close(ops.decode_attention(q, *caches, lengths, scale, None, slopes, window), wanted)
    blocks, table = zip(*(in_blocks(cache, lengths, 16) for cache in caches), strict=True)
    close(ops.decode_attention(q, *blocks, lengths.int(), scale, table[0], slopes, window), wanted)


@pytest.mark.parametrize("window", [None, 600])
def test_long_sequences_are_joined_from_chunks(ops, window):
    """More than one chunk of 512 tokens, with the greatest score in the last, first or middle one."""
    lengths = torch.tensor([2000, 1100])
    keys, values = numbers(2, 2, 2000, 16), numbers(2, 2, 2000, 16, seed=1)
    q = numbers(2, 4, 2, 16, seed=2)
    for place in (0, 900, 1099, 1999):
        keys[:, :, place] *= 6
        wanted = decode_attention_reference(q, keys, values, lengths, 1.0, None, None, window)
        close(ops.decode_attention(q, keys, values, lengths, 1.0, None, None, window), wanted)


def test_far_scores_neither_overflow_nor_vanish(ops):
    q, values = torch.ones(1, 1, 1, 4), numbers(1, 1, 200, 4)
    for size in (1e4, -1e4):
        keys = torch.full((1, 1, 200, 4), size)
        keys[0, 0, 70] += 100
        wanted = decode_attention_reference(q, keys, values, torch.tensor([200]), 1.0)
        close(ops.decode_attention(q, keys, values, torch.tensor([200]), 1.0, None, None, None), wanted)
    keys[0, 0, 3] = float("nan")
    assert ops.decode_attention(q, keys, values, torch.tensor([200]), 1.0, None, None, None).isnan().all()


def test_accepts_non_contiguous_tensors(ops):
    lengths = torch.tensor([9, 12])
    q = numbers(2, 1, 4, 8).transpose(1, 2)
    keys, values = numbers(2, 12, 2, 8, seed=1).transpose(1, 2), numbers(2, 2, 8, 12, seed=2).mT
    wanted = decode_attention_reference(q, keys, values, lengths, 0.5)
    close(ops.decode_attention(q, keys, values, lengths, 0.5, None, None, None), wanted)


def test_threads_give_the_same_bits(ops):
    before = torch.get_num_threads()
    arguments = numbers(2, 4, 1, 64), numbers(2, 4, 900, 64, seed=1), numbers(2, 4, 900, 64, seed=2)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(ops.decode_attention(*arguments, torch.tensor([900, 30]), 0.1, None, None, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_refuses_by_name(ops):
    q, cache, lengths = torch.ones(2, 6, 1, 8), torch.ones(2, 3, 12, 8), torch.tensor([4, 5])
    blocks, table = torch.ones(4, 4, 3, 8), torch.zeros(2, 2, dtype=torch.int32)

    def refused(match, *args):
        with pytest.raises(RuntimeError, match=f"decode_attention: {match}"):
            ops.decode_attention(*args, *(None,) * (8 - len(args)))

    refused("q: found dtype float64", q.double(), cache, cache, lengths, 1.0)
    refused(r"q: found shape \(6, 1, 8\)", q[0], cache, cache, lengths, 1.0)
    refused("k_cache: found dtype bfloat16, but it must be dtype float32", q, cache.bfloat16(), cache, lengths, 1.0)
    refused(r"k_cache: found shape \(2, 4, 12, 8\)", q, torch.ones(2, 4, 12, 8), cache, lengths, 1.0)
    refused(r"v_cache: found shape \(2, 3, 9, 8\)", q, cache, cache[:, :, :9], lengths, 1.0)
    refused("v_cache: found a tensor on meta", q, cache, cache.to("meta"), lengths, 1.0)
    refused("lengths: found dtype float32", q, cache, cache, lengths.float(), 1.0)
    refused(r"lengths: found shape \(1\)", q, cache, cache, lengths[:1], 1.0)
    refused(r"lengths\[1\]: found 13, but it must be from 1 to 12", q, cache, cache, lengths + 8, 1.0)
    refused(r"lengths\[0\]: found 9, but it must be from 1 to 8", q, blocks, blocks, lengths + 5, 1.0, table)
    refused(r"block_table: found shape \(1, 2\)", q, blocks, blocks, lengths, 1.0, table[:1])
    refused(r"block_table\[0\]: found block 4, but it must be from 0 to 3", q, blocks, blocks, lengths, 1.0, table + 4)
    refused(r"alibi_slopes: found shape \(3\)", q, cache, cache, lengths, 1.0, None, torch.ones(3))
    refused("window: found 0", q, cache, cache, lengths, 1.0, None, None, 0)


def test_opcheck(ops):
    q, cache, lengths = numbers(2, 6, 2, 8), numbers(2, 3, 12, 8), torch.tensor([4, 5])
    blocks, table = in_blocks(cache, lengths, 4)
    for args in (
        (q, cache, cache, lengths, 1.0, None, torch.ones(6), 3),
        (q.bfloat16(), blocks.bfloat16(), blocks.bfloat16(), lengths.int(), 1.0, table, None, None),
    ):
        torch.library.opcheck(ops.decode_attention.default, args)


def test_the_front_runs_the_operator_and_compiles(ops, monkeypatch):
    arguments = numbers(2, 6, 2, 8), numbers(2, 3, 12, 8), numbers(2, 3, 12, 8, seed=1), torch.tensor([4, 5])
    with torch.profiler.profile(acc_events=True) as profile:
        found = decode_attention(*arguments, 1.0, window=3)
    assert "ds_cpu::decode_attention" in {event.key for event in profile.key_averages()}
    compiled = torch.compile(decode_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments, 1.0, window=3), found)
    monkeypatch.setenv("DS_OPS_DISABLE", "ragged_device_ops")
    close(decode_attention(*arguments, 1.0, window=3), found)
