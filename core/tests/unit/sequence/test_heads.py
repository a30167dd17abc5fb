"""Which heads each rank computes: every head once, KV heads where they are needed."""

import pytest
from deepspeed.sequence.exchange import HeadDivision

DIVISIONS = [
    (heads, kv, ranks)
    for heads in range(1, 13)
    for kv in range(1, heads + 1)
    if heads % kv == 0
    for ranks in range(1, heads + 1)
]


def test_query_heads_are_divided_once_and_evenly():
    for division in DIVISIONS:
        heads = HeadDivision(*division)
        assert [head for start, stop in heads.query for head in range(start, stop)] == list(range(heads.num_heads))
        sizes = [stop - start for start, stop in heads.query]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_each_query_head_finds_its_kv_head():
    for division in DIVISIONS:
        heads = HeadDivision(*division)
        group = heads.num_heads // heads.num_kv_heads
        for rank, ((start, stop), (first, last)) in enumerate(zip(heads.query, heads.key_value, strict=True)):
            index = heads.local_kv_index(rank)
            assert [first + place for place in index] == [head // group for head in range(start, stop)]
            assert set(index) == set(range(last - first))  # no KV head comes for nothing
            repeated = [place for place in range(last - first) for _ in range((stop - start) // (last - first))]
            assert heads.is_grouped(rank) == (list(index) == repeated)


def test_even_divisions_keep_the_groups():
    heads = HeadDivision(8, 4, 2)
    assert heads.query == ((0, 4), (4, 8))
    assert heads.key_value == ((0, 2), (2, 4))
    assert heads.is_grouped(0)
    assert heads.is_grouped(1)


def test_a_kv_head_goes_to_every_rank_that_shares_it():
    assert HeadDivision(8, 2, 4).key_value == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert HeadDivision(6, 2, 4).key_value == ((0, 1), (0, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("division", "message"),
    [((2, 2, 3), "2 attention heads for 3 ranks.*at most 2 ranks"), ((6, 4, 2), "6 query heads with 4 key and value")],
)
def test_impossible_divisions_say_what_would_fit(division, message):
    with pytest.raises(ValueError, match=message):
        HeadDivision(*division)
