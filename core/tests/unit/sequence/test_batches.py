"""Batches before they are divided: positions, shifted labels, padding, and what is refused."""

import pytest
import torch
from deepspeed.sequence.batches import prepare


def test_labels_are_shifted_before_they_are_divided():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    batch = prepare({"input_ids": tokens, "labels": tokens}, 2)
    assert "labels" not in batch
    assert batch["shift_labels"].tolist() == [[2, 3, 4, 5, 6, 7, 8, -100]]
    assert batch["position_ids"].tolist() == [list(range(8))]


def test_a_short_sequence_is_padded_and_its_padding_is_ignored():
    batch = {
        "input_ids": torch.tensor([[3, 4, 5, 6]]),
        "labels": torch.tensor([[3, 4, 5, 6]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "position_ids": torch.tensor([[7, 8, 9, 10]]),
        "weight": torch.tensor([0.5]),
        "name": "x",
    }
    padded = prepare(batch, 3)
    assert padded["input_ids"].tolist() == [[3, 4, 5, 6, 0, 0]]
    assert padded["shift_labels"].tolist() == [[4, 5, 6, -100, -100, -100]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]]
    assert padded["position_ids"].tolist() == [[7, 8, 9, 10, 11, 12]]
    assert padded["weight"] is batch["weight"]
    assert padded["name"] == "x"
    assert batch["input_ids"].shape == (1, 4)  # the loader's own batch is as it was


def test_positions_in_three_dimensions_are_padded_along_the_tokens():
    positions = torch.arange(3).expand(3, 1, 3)
    padded = prepare({"input_ids": torch.ones(1, 3, dtype=torch.int64), "position_ids": positions}, 2)
    assert padded["position_ids"].shape == (3, 1, 4)
    assert padded["position_ids"][1, 0].tolist() == [0, 1, 2, 3]


def test_left_padding_is_no_new_document():
    batch = {
        "input_ids": torch.ones(1, 4, dtype=torch.int64),
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
        "position_ids": torch.tensor([[1, 1, 0, 1]]),
    }
    assert prepare(batch, 2)["position_ids"].tolist() == [[1, 1, 0, 1]]


@pytest.mark.parametrize(
    ("batch", "pads", "message"),
    [
        ({"input_ids": torch.ones(1, 5)}, False, "5 tokens are to be divided among 2 ranks; pad them to 6"),
        ({"input_ids": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}, True, "several documents"),
        ({"pixels": torch.ones(1, 4)}, True, "found the keys pixels; sequences are known by input_ids"),
    ],
)
def test_refused(batch, pads, message):
    with pytest.raises(ValueError, match=message):
        prepare(batch, 2, pads)
