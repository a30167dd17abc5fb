"""Nested batches: their tensors are moved, changed, measured and compared; everything else is left alone."""

from collections import UserDict, namedtuple

import pytest
import torch
from deepspeed.runtime.utils import (
    compare_tensors_in_structures,
    copy_to_device,
    get_tensor_bytes,
    move_to_device,
)
from deepspeed.runtime.zero.utils import apply_to_tensors_only, isinstance_namedtuple

Pair = namedtuple("Pair", "tensor text")


def test_nested_batches():
    batch = {"ids": torch.ones(2), "more": [torch.zeros(1), ("text", 3)], "none": None}
    moved = move_to_device(batch, "meta")
    assert moved["ids"].device.type == moved["more"][0].device.type == "meta"
    assert moved["more"][1] == ("text", 3)
    assert moved["none"] is None
    assert batch["ids"].device.type == "cpu"


def test_a_criterion_keeps_leaves_where_they_are():
    small, large = torch.ones(1), torch.ones(9)
    moved = move_to_device([small, large], "meta", criterion_func=lambda leaf: leaf.numel() > 4)
    assert moved[0] is small
    assert moved[1].device.type == "meta"


def test_a_copy_goes_where_the_criterion_says():
    copied = copy_to_device({"a": torch.ones(1), "b": (torch.ones(2), 3)}, "meta", torch.is_tensor)
    assert copied["a"].device.type == copied["b"][0].device.type == "meta"
    assert copied["b"][1] == 3


def test_a_function_of_the_tensors_alone():
    changed = apply_to_tensors_only(
        lambda tensor: tensor + 1, {"a": [torch.zeros(1), 2], "b": Pair(torch.ones(1), "x")}
    )
    assert changed == {"a": [torch.ones(1), 2], "b": Pair(torch.full((1,), 2.0), "x")}
    assert isinstance_namedtuple(changed["b"])
    assert not isinstance_namedtuple((1, 2))


def test_bytes_of_all_tensors():
    assert get_tensor_bytes({"a": [torch.ones(3), (torch.ones(2, dtype=torch.bfloat16),)], "b": 3}) == 16
    assert get_tensor_bytes("text") == 0


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({"a": torch.ones(2), "b": [1]}, True),
        ({"a": torch.zeros(2), "b": [1]}, False),
        ({"a": torch.ones(2), "b": [2]}, False),
        ({"a": torch.ones(2, dtype=torch.float64), "b": [1]}, False),
        ({"a": torch.ones(2)}, False),
        ({"a": 1, "b": [1]}, False),
    ],
)
def test_structures_are_compared_place_by_place(other, is_same):
    assert compare_tensors_in_structures({"a": torch.ones(2), "b": [1]}, other) is is_same


class Batch(dict):
    """As libraries derive them; transformers' is a UserDict."""


def test_containers_of_other_classes_are_containers_too():
    batch = Batch(ids=torch.ones(2))
    user = UserDict(ids=torch.ones(2))
    assert get_tensor_bytes([batch, user]) == 16
    for item in (batch, user):
        moved = move_to_device(item, "meta")
        assert type(moved) is type(item)
        assert moved["ids"].device.type == "meta"
        assert item["ids"].device.type == "cpu"


def test_the_order_of_keys_is_nothing():
    one, two = torch.ones(1), torch.ones(2)
    assert compare_tensors_in_structures({"a": one, "b": two}, {"b": two, "a": one})
