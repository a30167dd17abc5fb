"""move_to_device: nested batches arrive, everything else is left alone."""

import torch
from deepspeed.runtime.utils import move_to_device


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
