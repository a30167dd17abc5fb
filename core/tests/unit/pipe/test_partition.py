"""Cuts of layers into stages, beside a search of all cuts."""

import itertools

import pytest
from deepspeed.errors import ConfigError
from deepspeed.pipe.layers import check_method, partition_balanced, partition_uniform, type_weights
from hypothesis import given
from hypothesis import strategies as st


def parts_of(weights, cuts):
    return [sum(weights[start:stop]) for start, stop in itertools.pairwise(cuts)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
def test_no_cut_has_a_lighter_heaviest_part(weights, num_parts):
    num_parts = min(num_parts, len(weights))
    cuts = partition_balanced(weights, num_parts)
    assert len(cuts) == num_parts + 1
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    assert all(start < stop for start, stop in itertools.pairwise(cuts))
    all_cuts = ((0, *inner, len(weights)) for inner in itertools.combinations(range(1, len(weights)), num_parts - 1))
    key = [(max(parts_of(weights, each)), sum(part**2 for part in parts_of(weights, each))) for each in all_cuts]
    own = parts_of(weights, cuts)
    assert (max(own), sum(part**2 for part in own)) == min(key)


def test_equal_layers():
    assert partition_uniform(8, 4) == [0, 2, 4, 6, 8]
    assert sorted(parts_of([1] * 10, partition_uniform(10, 4))) == [2, 2, 3, 3]


def test_layers_by_type():
    names = ["Embedding", "Block", "Block", "LayerNorm", "BlockEnd"]
    assert type_weights("type:block", names) == [0, 1, 1, 0, 1]
    assert type_weights("type:^block$", names) == [0, 1, 1, 0, 0]
    with pytest.raises(ConfigError, match="expression is wrong"):
        type_weights("type:(", names)


def test_wrong_partitions_are_refused():
    with pytest.raises(ConfigError, match="found 3 parts for 2 layers.*use 1 to 2"):
        partition_balanced([1, 1], 3)
    with pytest.raises(ConfigError, match="found 'best'; use one of parameters, uniform, type:REGEX, profile"):
        check_method("best")
    assert check_method("Parameters") == "parameters"
