"""Who holds which heads and features."""

import pytest
from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.plans import Along, Rule
from deepspeed.tensor_parallel.ranges import cut_dim, share_heads, spread
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

sizes = st.integers(1, 40)


@given(total=sizes, parts=st.integers(1, 9), grain=st.integers(1, 5))
def test_ranges_are_neighbors_and_as_even_as_their_grain_allows(total, parts, grain):
    ranges = spread(total, parts, grain)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))
    assert all(start % grain == 0 or start == total for start, _ in ranges)
    blocks = [-(-(stop - start) // grain) for start, stop in ranges]
    assert max(blocks) - min(blocks) <= 1


@given(num_keys=st.integers(1, 6), per_key=st.integers(1, 6), num_ranks=st.integers(1, 9))
def test_every_query_head_is_on_one_rank_with_its_key(num_keys, per_key, num_ranks):
    num_heads = num_keys * per_key
    crowd = -(-num_ranks // num_keys)
    if num_keys < num_ranks and per_key < crowd:
        with pytest.raises(ConfigError, match=f"found {num_heads} query heads? and {num_keys} key and value heads"):
            share_heads(num_heads, num_keys, num_ranks, "attn")
        return
    shares = share_heads(num_heads, num_keys, num_ranks, "attn")
    assert [head for share in shares for head in range(*share.queries)] == list(range(num_heads))
    for share in shares:
        assert {head // per_key for head in range(*share.queries)} == set(range(*share.keys))
        assert share.num_queries % share.num_keys == 0
    counted = [key for share in shares if share.counts_keys for key in range(*share.keys)]
    assert counted == list(range(num_keys))


@pytest.mark.parametrize("along", [Along.QKV_BLOCKS, Along.QKV_GROUPS])
@pytest.mark.parametrize(("num_heads", "num_keys", "num_ranks"), [(4, 4, 3), (6, 3, 2), (4, 1, 2), (4, 2, 3)])
def test_a_fused_weight_is_cut_into_the_heads_of_each_rank(along, num_heads, num_keys, num_ranks):
    shares, size = share_heads(num_heads, num_keys, num_ranks, "attn"), 2
    per_key = num_heads // num_keys
    if along is Along.QKV_BLOCKS:
        rows = [("q", h) for h in range(num_heads)] + [(kind, k) for kind in "kv" for k in range(num_keys)]
    else:
        rows = [
            row for k in range(num_keys)
            for row in [*(("q", k * per_key + h) for h in range(per_key)), ("k", k), ("v", k)]
        ]  # fmt: skip
    rows = [row for row in rows for _ in range(size)]
    cuts = cut_dim(Rule("qkv", Shard(0), along), len(rows), "qkv", shares, num_ranks=num_ranks, grain=1)
    for share, cut in zip(shares, cuts, strict=True):
        held = [row for start, stop in cut.ranges for row in rows[start:stop]]
        expected = {("q", h) for h in range(*share.queries)} | {(kind, k) for kind in "kv" for k in range(*share.keys)}
        assert set(held) == expected
        assert len(held) == size * len(expected)
        if num_keys < num_ranks:  # the rows that ranks share are the last ones
            assert {kind for kind, _ in held[-cut.shared :]} == {"k", "v"}


def test_features_of_fused_blocks_are_cut_block_by_block():
    cuts = cut_dim(Rule("gate_up", Shard(0), blocks=(4, 6)), 10, "gate_up", [], num_ranks=2, grain=1)
    assert [cut.ranges for cut in cuts] == [((0, 2), (4, 7)), ((2, 4), (7, 10))]


@pytest.mark.parametrize(
    ("rule", "total", "message"),
    [
        (
            Rule("fc", Shard(0)),
            2,
            "fc: found 2 features to divide over 3 tensor-parallel ranks in multiples of 1",
        ),
        (Rule("fc", Shard(0), blocks=(4, 4)), 9, r"fc: found 9 features, which are not the blocks \(4, 4\)"),
        (
            Rule("fc", Shard(0), Along.QUERIES),
            9,
            "fc: found 9 features along the divided dim, which are not 4 heads",
        ),
        (Rule("fc", Shard(0), Along.QKV_BLOCKS), 15, "which are not 12 heads of equal size"),
    ],
)
def test_what_does_not_fit_is_named(rule, total, message):
    with pytest.raises(ConfigError, match=message):
        cut_dim(rule, total, "fc", share_heads(4, 4, 3, "attn"), num_ranks=3, grain=1)
